"""Which choices a comparison makes of a spec, and which of them are on the front."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhfless.planning.dimensions import (
    QUANTIZATION,
    SHARE_PREFIXES,
    SPECULATION,
    Dimensions,
    like,
    no_engine,
    quantization_problem,
)
from rlhfless.planning.inputs import DeviceCount
from rlhfless.planning.memory_plan import Question
from rlhfless.planning.objects import PlannedCost
from rlhfless.prediction import compare
from rlhfless.prediction.compare import (
    TURNS,
    Choice,
    Tried,
    as_json,
    choices_of,
    front,
    placement_of,
    spec_of,
    try_choice,
)
from rlhfless.prediction.run_plan import Planner, chosen_devices
from rlhfless.prediction.simulated import Predicted, _engine
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.prices import load_price_book
from rlhfless.spec import PartialSpec, RunSpec
from rlhfless.spec.errors import InputError

SPEC = RunSpec.model_validate(
    {
        "model": {"path": "m"},
        "prompts": {"path": "p.jsonl"},
        "rewards": [{"type": "exact_match"}],
        "steps": 10,
        "placement": {"mode": "colocated", "turns": False},
    }
)


DENSE = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 97, "torch_dtype": "bfloat16",
}  # fmt: skip


def tried(wall_s: float | None, cost_usd: float = 0.0, count: int = 1, problems: tuple[str, ...] = ()) -> Tried:
    choice = Choice("h100", count, {"placement.mode": "colocated", "schedule.type": "sync"})
    if wall_s is None:
        return Tried(choice, "co-located", problems)
    cost = PlannedCost(
        steps=10,
        step_s=wall_s / 10,
        wall_s=wall_s,
        wall_low_s=wall_s,
        wall_high_s=wall_s,
        cost_usd=cost_usd,
        cost_low_usd=cost_usd,
        cost_high_usd=cost_usd,
    )
    found = Predicted(cost, 36.0, 5e5, {"generation": 0.75, "learner": 0.25}, "a sheet")
    return Tried(choice, "co-located", predicted=found)


def test_on_the_front_is_what_no_other_beats_in_both() -> None:
    fast, between, cheap = tried(100.0, 9.0, 8), tried(200.0, 5.0, 4), tried(400.0, 2.0, 1)
    beaten = tried(250.0, 6.0, 2), tried(400.0, 3.0, 3), tried(100.0, 10.0, 16)
    assert front([beaten[0], cheap, *beaten[1:], fast, between, tried(None)]) == [fast, between, cheap]


def first_cost(answer: dict[str, Any]) -> dict[str, float]:
    return answer["rows"][0]["costs_usd"]


def test_rows_have_an_order_and_figures_by_hand() -> None:
    every = [tried(None, count=2, problems=("too large",)), tried(250.0, 6.0, 2), tried(400.0, 2.0), tried(100.0, 9.0)]
    answer = as_json(Planner(SPEC), every, deadline_s=300.0)
    assert first_cost(answer) == pytest.approx({"rent": 9.0, "hyperscaler": 9.0 * 10.0 / 2.95})
    walls = [row["predicted"] and row["predicted"]["wall_s"] for row in answer["rows"]]
    assert walls == [100.0, 250.0, 400.0, None], "on the front, beaten, late, too large"
    first = answer["rows"][0]
    assert first["step_usd"] == 0.9
    assert first["usd_per_million_tokens"] == pytest.approx(1.8)
    assert first["energy_kwh"] == pytest.approx(36.0 * 700 / 3.6e6)
    assert answer["rows"][3]["problems"] == ["too large"]
    assert (first["latency"], first["no_engine"]) == ("a sheet", None)
    assert (first["quantization"], first["speculation"], first["share_prefixes"]) == ("off", "off", True)


def test_formats_that_no_run_can_have_are_planned_for() -> None:
    assert Dimensions(quantization=("off", "fp8", "off")).ways(SPEC) == [{QUANTIZATION: "off"}, {QUANTIZATION: "fp8"}]
    assert Dimensions().ways(SPEC) == [{}]
    assert no_engine(SPEC, "off", "h100") is None
    assert no_engine(SPEC, "fp8", "h100") is None, "runs generate in fp8 where the device has it"
    experts = replace(ModelShape.of_config(DENSE), experts=8)
    assert "the model has experts" in str(no_engine(SPEC, "fp8", "h100", experts))
    assert no_engine(SPEC, "off", "h100", experts) is None
    assert "no engine of rlhfless" in str(no_engine(SPEC, "off", "tpu-v5e"))


def test_a_choice_in_fp8_is_a_run_with_that_quantization() -> None:
    own = spec_of(SPEC, Choice("h100", 8, {"placement.mode": "colocated", QUANTIZATION: "fp8"}))
    assert own.generation.quantization == "fp8"
    for kind, bits in (("h100", (8, 8)), (CPU_KIND, (8, 16))):
        settings = _engine(Question(own, None, device_of(kind), 8, 1024, 0))  # type: ignore[arg-type]
        assert (settings["weight_bits"], settings["product_bits"]) == bits
    plain = _engine(Question(SPEC, None, device_of("h100"), 8, 1024, 0))  # type: ignore[arg-type]
    assert (plain["weight_bits"], plain["product_bits"]) == (16, 16)
    assert like(own, own)
    assert not like(own, SPEC)


def test_fp8_needs_products_of_8_bits_and_a_correction() -> None:
    fp8 = {QUANTIZATION: "fp8"}
    written = RunSpec.model_construct(type="sft", algorithm=None)
    assert quantization_problem(written, fp8, "h100") == "a run of type sft generates nothing"
    assert quantization_problem(written, {}, "h100") is None
    assert quantization_problem(SPEC, fp8, "h100") is None
    refused = "generation.quantization is fp8: a100-80gb has no products of 8 bit floats"
    assert quantization_problem(SPEC, fp8, "a100-80gb") == refused
    plain = RunSpec.model_validate(
        SPEC.model_dump(exclude_unset=True) | {"algorithm": {"type": "grpo", "importance": None}}
    )
    assert "leave algorithm.importance out" in str(quantization_problem(plain, fp8, "h100"))
    assert quantization_problem(plain, {}, "a100-80gb") is None
    assert try_choice(
        Planner(SPEC), Choice("a100-80gb", 8, {"placement.mode": "colocated", TURNS: False, **fp8})
    ).problems


def test_each_setting_is_tried_with_each_other_and_is_one_of_the_run() -> None:
    ways = Dimensions(speculation=("off", "suffix"), share_prefixes=(True, False)).ways(SPEC)
    suffix = {SPECULATION: {"method": "suffix"}}
    assert ways == [
        {SHARE_PREFIXES: True},
        {SHARE_PREFIXES: False},
        {**suffix, SHARE_PREFIXES: True},
        {**suffix, SHARE_PREFIXES: False},
    ]
    changed = spec_of(SPEC, Choice("h100", 8, {"placement.mode": "colocated", **ways[3]}))
    assert (changed.generation.speculation.method, changed.learner.share_prefixes) == ("suffix", False)


def test_a_learner_on_other_devices_is_a_choice() -> None:
    choices = choices_of(SPEC, ["8xl40s+2xh100", "4xh100"])
    own = [each for each in choices if each.devices == {"l40s": 8, "h100": 2}]
    assert [each.changes["schedule.type"] for each in own] == ["sync", "one_step_off"]
    assert [(each.devices, each.changes["placement.mode"]) for each in choices[len(own) :][:2]] == [
        ({"h100": 4}, "colocated"),
        ({"h100": 4}, "disaggregated"),
    ]
    placement = spec_of(SPEC, own[0]).placement
    assert (placement.kind, placement.devices) == ("l40s", 8)
    assert (placement.learner_kind, placement.learner_devices) == ("h100", 2)
    assert placement_of(own[1]) == "2 h100 learn, 1 ahead"
    before = SPEC.model_copy(update={"placement": placement})
    assert spec_of(before, choices[-1]).placement.learner_kind is None, "a choice of one kind has one"
    with pytest.raises(InputError, match="names h100 for both sides\n    write 10xh100"):
        choices_of(SPEC, ["8xh100+2xh100"])


def test_generation_is_not_planned_on_the_learners_devices() -> None:
    placement = {"mode": "disaggregated", "learner_kind": "h100"}
    spec = RunSpec.model_validate(SPEC.model_dump(exclude_unset=True) | {"placement": placement})
    assert chosen_devices(spec, {"h100": 2, "l40s": 8, CPU_KIND: 4}) == DeviceCount("l40s", 8)


def test_the_specs_own_schedule_is_compared_too() -> None:
    ahead = RunSpec.model_validate(
        SPEC.model_dump(exclude_unset=True) | {"schedule": {"type": "async", "max_staleness": 3}}
    )
    choices = choices_of(ahead, ["4xh100"])
    own = [each for each in choices if "schedule" in each.changes]
    assert [placement_of(each) for each in own] == ["1 learn, async", "2 learn, async"]
    assert spec_of(ahead, own[0]).schedule == ahead.schedule
    assert spec_of(ahead, choices[0]).schedule.type == "sync", "its keys do not stay"
    late = SPEC.model_copy(update={"schedule": PartialSpec()})
    assert [placement_of(each) for each in choices_of(late, ["1xh100"])] == ["co-located", "co-located, partial"]


def test_drafts_that_nobody_measured_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    spec = SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"path": str(tmp_path)})})
    choice = Choice("h100", 8, {"placement.mode": "colocated", TURNS: False, SPECULATION: {"method": "ngram"}})
    found = try_choice(Planner(spec), choice)
    assert (found.problems, found.predicted) == ((), None)
    assert "drafts of ngram are not known" in str(found.reason)


def test_the_learners_side_gets_a_quarter_or_half_of_the_devices() -> None:
    shared = (None, "sync")
    for text, apart in {"1xh100": [], "2xh100": [1], "8xh100": [2, 4], "4xcpu-core": []}.items():
        tries = [choice.changes for choice in choices_of(SPEC, [text])]
        keys = ("placement.learner_devices", "schedule.type")
        found = [tuple(map(changes.get, keys)) for changes in tries]
        assert found == [shared, *((each, schedule) for each in apart for schedule in ("sync", "one_step_off"))]


def test_a_choice_changes_the_spec_and_leaves_open_what_was() -> None:
    apart = {"placement.mode": "disaggregated", "placement.learner_devices": 2, "schedule.type": "sync"}
    choice = Choice("b200", 8, apart)
    changed = spec_of(SPEC, choice)
    assert (changed.placement.kind, changed.placement.devices, changed.placement.learner_devices) == ("b200", 8, 2)
    assert "learner" not in changed.model_fields_set
    added = changed.placement.model_fields_set - SPEC.placement.model_fields_set
    assert added == {"kind", "devices", "learner_devices"}


def searched(
    monkeypatch: pytest.MonkeyPatch, holds: int, present: dict[str, int] | None = None, **changes: Any
) -> tuple[list[Tried], list[Choice]]:
    """A search in which a run fits on `holds` devices of a kind or more, and twice as many are a third faster. All
    kinds are as fast; dollars are as in the price book."""
    asked: list[Choice] = []

    def found(planner: Planner, choice: Choice) -> Tried:
        asked.append(choice)
        if choice.count < holds:
            return Tried(choice, "co-located", ("too large",))
        wall_s = 1000.0 * choice.count ** math.log2(2 / 3) + (choice.changes["placement.mode"] != "colocated")
        price = load_price_book(None).device(choice.kind).usd_per_hour
        one = tried(wall_s, wall_s * price * choice.count / 3600, choice.count)
        return replace(one, choice=choice)

    monkeypatch.setattr(compare, "try_choice", found)
    spec = RunSpec.model_validate(SPEC.model_dump(exclude_unset=True) | changes)
    return compare.compared(Planner(spec), [], present=present or {}), asked


@pytest.mark.parametrize(("holds", "counts"), [(1, {1, 8}), (2, {8, 16}), (9, {16, 64}), (64, {64})])
def test_a_search_tries_numbers_of_devices_that_suit_the_model(
    monkeypatch: pytest.MonkeyPatch, holds: int, counts: set[int]
) -> None:
    """Of 14 kinds the smallest number that holds the run, and the next one of the best kinds."""
    found, asked = searched(monkeypatch, holds)
    assert {each.choice.count for each in found if not each.problems} == counts
    assert {each.choice.count for each in found if each.problems} == set()
    assert len(asked) < 130, "there are 264 choices"
    kinds = {each.choice.kind for each in found}
    assert len(kinds) > 10
    assert len({each.choice.kind for each in found if each.choice.changes["placement.mode"] != "colocated"}) <= 4


def test_a_run_that_nothing_holds_has_rows_that_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = searched(monkeypatch, 1000)
    assert {(each.choice.count, each.problems) for each in found} == {(64, ("too large",))}


@pytest.mark.parametrize(
    ("contract", "first"),
    [
        ({"type": "weighted", "time_weight": 0}, 1),
        ({"type": "weighted", "time_weight": 1}, 8),
        ({"type": "cheapest", "deadline_s": 400, "per": "run"}, 8),
        ({"type": "cheapest", "deadline_s": 4000, "per": "run"}, 1),
        ({"type": "fastest", "budget_usd": 1000, "per": "run"}, 8),
        ({"type": "fastest", "budget_usd": 0.2, "per": "run"}, 1),
    ],
)
def test_the_first_row_is_the_contracts(monkeypatch: pytest.MonkeyPatch, contract: dict[str, Any], first: int) -> None:
    found, _ = searched(monkeypatch, 1, scaling={"contract": contract})
    spec = RunSpec.model_validate(SPEC.model_dump(exclude_unset=True) | {"scaling": {"contract": contract}})
    assert as_json(Planner(spec), found)["rows"][0]["count"] == first


def test_devices_that_are_there_are_tried_in_every_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = searched(monkeypatch, 1, present={"h100": 4, CPU_KIND: 2, "unheard-of": 3})
    own = [each.choice for each in found if (each.choice.kind, each.choice.count) == ("h100", 4)]
    assert len(own) == 5
    assert any(each.choice.kind == CPU_KIND for each in found)
    keys = [(each.choice.kind, each.choice.count, str(each.choice.changes)) for each in found]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("limit", [1, 3, None, 1000])
def test_rows_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    found, _ = searched(monkeypatch, 1)
    answer = as_json(Planner(SPEC), found, limit=limit)
    shown = min(limit or 1000, len(found))
    assert (len(answer["rows"]), answer["tried"], answer["left_out"]) == (shown, len(found), len(found) - shown)
    assert answer["rows"][0] == as_json(Planner(SPEC), found)["rows"][0], "the best stays"
    for each in answer["sensitivity"]:
        assert max(each["fastest"], each["cheapest"]) <= shown


def test_a_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SEARCH_S", -1.0)
    found, asked = searched(monkeypatch, 1)
    assert {each.choice.count for each in found} == {1}, "the best kinds are not tried any further"
    assert len(asked) == len(found) + len(front(found))
