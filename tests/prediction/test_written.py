"""Time and cost of runs that learn from written responses, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.tiny_models import QWEN_05B
from rlhfless.planning.memory_plan import Question
from rlhfless.planning.resolve import question_of
from rlhfless.prediction.compare import choices_of, compared
from rlhfless.prediction.run_plan import Planner
from rlhfless.prediction.schedules import schedules_of
from rlhfless.prediction.simulated import SHEET_FACTOR, Lengths
from rlhfless.prediction.supervised_cost import RESPONSE_TOKENS, Seconds, written, written_lengths
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.replay.calibrate import LearningFit
from rlhfless.sim.replay.latency_file import LineFit
from rlhfless.spec import RunSpec
from rlhfless.spec.data import DATA

KNOWN = Lengths(0.0, 300.0, 0.0, 100.0, "by hand", known=True, rows=640)


def question(folder: Path, run_type: str, kind: str = "h100", count: int = 2, **changes: Any) -> Question:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(QWEN_05B))
    values = {
        "type": run_type,
        "model": {"path": str(folder / "model")},
        DATA[run_type]: {"path": str(folder / "rows.jsonl")},  # type: ignore[index]
        "steps": 40,
        "prompts_per_step": 32,
    }
    return question_of(RunSpec.model_validate(values | changes), kind, count)


def test_a_step_of_demonstrations_is_its_tokens_by_the_data_sheet(tmp_path: Path) -> None:
    asked = question(tmp_path, "sft", learner={"ranks": 2})
    found = written(asked, KNOWN, None)
    tokens = 32 * (100 + 300)
    assert not asked.spec.learner.recomputes, "0.5B on two H100: 6 operations at a rate at which 8 take 6 / 0.24"
    learn_s = tokens * 4.5 * asked.shape.active / (asked.sheet.flops_per_s.value * 2 * 0.24)
    assert found.cost.step_s == pytest.approx(learn_s + 2.0)
    assert found.cost.wall_s == pytest.approx(40 * (learn_s + 2.0))
    assert found.cost.wall_high_s == pytest.approx(SHEET_FACTOR * found.cost.wall_s)
    assert found.busy_device_s == pytest.approx(2 * learn_s)
    assert found.response_tokens == 32 * 300
    assert found.shares == {"learner": pytest.approx(learn_s / (learn_s + 2.0))}
    hourly = 2 * load_price_book(None).device("h100").usd_per_hour
    assert found.cost.cost_usd == pytest.approx(found.cost.wall_s / 3600 * hourly)


def test_ranks_that_share_a_core_are_no_faster_than_one(tmp_path: Path) -> None:
    one, two = (question(tmp_path, "sft", "cpu-core", count, learner={"ranks": 2}) for count in (1, 2))
    learn_s = [written(asked, KNOWN, None).cost.step_s - 2.0 for asked in (one, two)]
    assert learn_s[0] == pytest.approx(2 * learn_s[1])
    assert written(one, KNOWN, None).busy_device_s == pytest.approx(learn_s[0])


def test_epochs_and_pairs_multiply_the_tokens_and_the_reference_reads_each_pair_once(tmp_path: Path) -> None:
    latency = LearningFit(
        {"reference": LineFit(fixed_s=0.5, token_s=1e-5)}, {}, LineFit(fixed_s=1.0, token_s=1e-4), driver_s=0.2
    )
    asked = question(tmp_path, "dpo", epochs=2)
    found = written(asked, KNOWN, latency)
    tokens = 32 * 2 * 400
    # 640 rows are new in 20 of 40 steps of 32.
    assert found.cost.step_s == pytest.approx(1.0 + 2e-4 * tokens + 0.5 * (0.5 + 1e-5 * tokens) + 0.2)
    assert found.cost.wall_high_s == pytest.approx(1.25 * found.cost.wall_s), "measured, at known lengths"
    assert found.cost.wall_low_s == pytest.approx(found.cost.wall_s / 1.25)
    all_new = written(asked, replace(KNOWN, rows=None), latency)
    assert all_new.cost.step_s == pytest.approx(found.cost.step_s + 0.5 * (0.5 + 1e-5 * tokens))


def test_the_reference_costs_its_share_of_a_device_until_it_has_read_all_pairs(tmp_path: Path) -> None:
    pair = question(tmp_path, "dpo", "cpu-core", 2)
    alone = question(tmp_path, "reward_model", "cpu-core", 2)
    latency = LearningFit({"reference": LineFit(fixed_s=0.0)}, {}, LineFit(fixed_s=9.0), driver_s=1.0)
    hourly = load_price_book(None).device("cpu-core").usd_per_hour
    assert written(alone, KNOWN, latency).cost.cost_usd == pytest.approx(2 * 400 / 3600 * hourly)
    # The reference has half of a core, in half of the steps.
    assert written(pair, KNOWN, latency).cost.cost_usd == pytest.approx((1.5 + 0.5 / 2) * 400 / 3600 * hourly)


def test_without_the_data_lengths_are_assumed_with_a_wider_band(tmp_path: Path) -> None:
    asked = question(tmp_path, "sft")
    lengths = written_lengths(asked.spec, None)
    assert (lengths.known, lengths.mean_tokens) == (False, RESPONSE_TOKENS)
    assert lengths.source.startswith("assumed: prompts of 256 and responses of 256 tokens (the data is no file")
    cost, seconds = written(asked, lengths, None).cost, Seconds.of_sheet(asked)
    twice_s = seconds.learn.at(2 * 32 * 512) + 2.0
    assert cost.wall_high_s == pytest.approx(40 * twice_s * SHEET_FACTOR)
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    assert "(" in written_lengths(asked.spec, None).source, "a file that cannot be read is named, and no error"


def test_devices_are_compared_with_all_of_them_for_the_learner(tmp_path: Path) -> None:
    asked = question(tmp_path, "sft")
    assert [dict(choice.changes) for choice in choices_of(asked.spec, ["8xh100"])] == [{"placement.mode": "colocated"}]
    spec = asked.spec.model_copy(update={"learner": asked.spec.learner.model_copy(update={"ranks": "auto"})})
    one, eight = compared(Planner(spec, found_lengths=KNOWN), ["1xh100", "8xh100"])
    assert one.predicted is not None
    assert eight.predicted is not None
    assert one.predicted.cost.step_s - 2.0 == pytest.approx(8 * (eight.predicted.cost.step_s - 2.0))
    assert schedules_of(asked, lambda _: (None, "not asked"))["schedules"] == []


@pytest.mark.parametrize(
    ("run_type", "phases"),
    [("sft", ["learn", "restore"]), ("dpo", ["learn", "restore"]), ("reward_model", ["learn", "values", "restore"])],
)
def test_no_memory_is_planned_for_a_publication(tmp_path: Path, run_type: str, phases: list[str]) -> None:
    (device,) = question(tmp_path, run_type, count=1).plan().devices
    learner = next(part for part in device.functions if part.function == "learner")
    assert [phase.name for phase in learner.phases] == phases
