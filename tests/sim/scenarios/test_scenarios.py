"""Scenario files: what is refused, and how it is said; the published set; sizes worked by hand."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from fakes.repository import SCENARIOS
from fakes.tiny_scenario import CONFIG, scenario, values
from rlhfless.records import Holding, Invocation, ReplicaState, Work
from rlhfless.scaling.latency.known_models import BUILT_IN
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.billing import by_use
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.experiment.contracts import ContractError
from rlhfless.sim.scenarios import load_scenario, timing
from rlhfless.sim.scenarios.build import ScenarioLayout, price_book, setup
from rlhfless.sim.scenarios.cluster import TransportSpec
from rlhfless.sim.scenarios.draw import batches
from rlhfless.sim.scenarios.load import resolved_yaml
from rlhfless.sim.scenarios.model import ScenarioModelSpec
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.spec.errors import InputError

EXAMPLES = sorted(SCENARIOS.glob("*.yaml"))


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(values(**changes)))
    return path


def machines(**changes: Any) -> dict[str, Any]:
    return {"machines": [{"kind": "l40s", "devices_per_node": 2, **changes}]}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stepz": 3}, r"stepz \(line \d+\): unknown key\n    did you mean `steps`\?"),
        ({"steps": 1}, r"steps \(line \d+\): 1: should be greater than or equal to 2"),
        ({"cluster": machines(kind="l40")}, r"kind is 'l40', of which nothing is known; did you mean `l40s`\?"),
        ({"cluster": machines(tenure="owned")}, "owned machines need a released_value from 0"),
        ({"cluster": machines(released_value=0.5)}, "tenure is 'rented' and released_value 0.5"),
        ({"model": {"name": "qwen2.5-7"}}, r"name is 'qwen2.5-7'; did you mean `qwen2.5-7b`\?"),
        ({"model": {}}, "give `name` .* or `config`, one of the two"),
        ({"model": {"config": {"num_hidden_layers": 2}}}, "`hidden_size` of the model's config is None"),
        ({"workload": {"type": "lognorm"}}, r"'lognorm' is not one of the types\n    did you mean `lognormal`\?"),
        ({"contract": {"type": "cheapest"}}, "give `deadline_s` or `deadline`, one of the two"),
        ({"engine": {"max_batch_tokens": 8}}, r"max_batch_tokens \(8\) is below max_sequences \(256\)"),
        (
            {"engine": {"speculation": {"accepted": [0.5], "depth": 2, "source": "s"}}},
            "depth is 2, and accepted has 1 places; name one for each draft",
        ),
        (
            {"engine": {"speculation": {"accepted": [0.5], "drafted": [1, 1], "source": "s"}}},
            "drafted has 2 places, and accepted 1; give as many of both",
        ),
        ({"engine": {"speculation": {"accepted": [0.5]}}}, r"speculation.source .*missing"),
        (
            {"placement": {"learner_elsewhere": {"h100": 1}}},
            r"placement.learner_elsewhere \(line \d+\): was removed\n    Give the learner one kind of device",
        ),
        ({"learner": {"min_devices": 1}}, r"learner.min_devices \(line \d+\): was removed\n    Leave it out"),
        ({"schedule": "auto"}, r"schedule \(line \d+\): 'auto' was removed\n    Name one"),
        ({"schedule": {"type": "sync", "streaming": True}}, r"schedule.streaming \(line \d+\): was removed"),
        ({"policies": [{"name": "a"}, {"name": "a"}]}, "policy 'a' appears twice; give one of them its own `label`"),
    ],
)
def test_errors_name_the_field_the_value_and_the_mend(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_scenario(written(tmp_path, **changes))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text("")
    with pytest.raises(InputError, match="the file is empty"):
        load_scenario(tmp_path / "scenario.yaml")
    with pytest.raises(InputError, match=r"no such file\n    did you mean `scenario.yaml`\?"):
        load_scenario(tmp_path / "scenarios.yaml")


def test_paths_count_from_the_file_and_a_resolved_scenario_reads_back(tmp_path: Path) -> None:
    loaded = load_scenario(written(tmp_path, workload={"type": "azure", "path": "trace.csv"}))
    assert loaded.workload.path == str(tmp_path / "trace.csv")  # type: ignore[union-attr]
    (tmp_path / "again.yaml").write_text(resolved_yaml(loaded))
    assert load_scenario(tmp_path / "again.yaml") == loaded


def test_all_policies_are_compared_unless_said_otherwise() -> None:
    plain = {key: value for key, value in values().items() if key != "policies"}
    names = [entry.name for entry in type(scenario()).model_validate(plain).policies]
    assert names[0] == "static_colocated"
    assert {"best_static", "clairvoyant", "rlhfless_published"} <= set(names)
    assert "static" not in names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_published_scenarios_fit(path: Path) -> None:
    loaded = load_scenario(path)
    assert loaded.name == path.stem
    assert loaded.workload.source  # type: ignore[union-attr]
    assert loaded.steps >= 2 * loaded.epoch_steps
    for mode in ("colocated", "disaggregated"):
        layout = ScenarioLayout(loaded, ScenarioPlacementSpec(mode=mode))
        assert layout.actors()
        layout.learner()
    price_book(loaded)


def test_the_published_set_covers_what_it_is_meant_to() -> None:
    loaded = [load_scenario(path) for path in EXAMPLES]
    assert len(loaded) >= 12
    kinds = {machines.kind for each in loaded for machines in each.cluster.machines}
    assert {"l40s", "a100-80gb", "h100", "h200"} <= kinds
    assert {machines.tenure for each in loaded for machines in each.cluster.machines} == {"rented", "spot", "owned"}
    assert {each.name.split("-")[1] for each in loaded} >= {"3b", "7b", "32b", "70b"}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-3b", 3.09),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-32b", 32.8),
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-8b", 8.03),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.1),
        ("qwen3.5-4b", 4.21),
        ("qwen3.5-9b", 8.95),
        ("qwen3.5-27b", 26.9),
        ("qwen3.5-35b-a3b", 34.66),
        ("qwen3.5-122b-a10b", 122.1),
        ("qwen3.5-397b-a17b", 396.3),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("glm-4.5-air", 106.9),
    ],
)
def test_built_in_models_have_the_parameters_of_their_cards(name: str, billions: float) -> None:
    assert name in BUILT_IN
    assert ScenarioModelSpec(name=name).shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_learning_and_memory_by_hand() -> None:
    one = scenario(model={"name": "qwen2.5-7b"})
    active = one.model.shape.active
    # 6 operations by 0.24 of 362 TFLOP/s on each of 2 devices; a forward pass does 2 of 8 operations in that time.
    assert timing.learn_token_s(one, "l40s", 2) == pytest.approx(6 * active / (2 * 362e12 * 0.24))
    assert timing.forward_token_s(one, "l40s", 2) == pytest.approx(timing.learn_token_s(one, "l40s", 2) / 4)
    kept = one.model_copy(update={"learner": one.learner.model_copy(update={"gradient_checkpointing": False})})
    assert timing.learn_token_s(one, "l40s", 2) == pytest.approx(4 / 3 * timing.learn_token_s(kept, "l40s", 2))
    assert timing.forward_token_s(one, "l40s", 2) == timing.forward_token_s(kept, "l40s", 2)
    part = one.model_copy(update={"learner": one.learner.model_copy(update={"learned_share": 0.25})})
    assert timing.learn_token_s(part, "l40s", 2) == pytest.approx(timing.learn_token_s(one, "l40s", 2) / 4)
    assert timing.forward_token_s(part, "l40s", 2) == timing.forward_token_s(one, "l40s", 2), "such as a reference's"
    # 48 GB x 0.85 less the weights, the widest layer of a batch, three copies of a batch's logits, 0.6 GiB of graphs
    # and 0.8 GiB of CUDA; 2 x 28 layers x 4 KV heads x 128 x 2 bytes for each token.
    engine = one.engine
    layer, logits = 2 * engine.max_batch_tokens * (4 * 3584 + 3 * 18944), 3 * 4 * engine.max_sequences * 152064
    reserved = layer + logits + 1.4 * 2**30
    for kind, memory in (("l40s", 48e9), ("l4", 24e9)):
        left = memory * 0.85 - reserved - one.model.shape.total_bytes
        assert timing.kv_tokens(one, kind) == pytest.approx(left / 57_344, abs=1)
    given = one.model_copy(update={"engine": engine.model_copy(update={"reserved_gb": 3.9})})
    assert timing.kv_tokens(given, "l40s") == int((48e9 * 0.85 - 3.9e9 - one.model.shape.total_bytes) / 57_344)
    # 16 bytes for each of 7.6 billion parameters, in 0.8 x 48 GB.
    assert timing.learner_devices_needed(one, "l40s") == 4


def test_a_learner_of_experts_levels_off_with_few_tokens_by_hand() -> None:
    """85 TFLOP/s of a device, whatever its peak, and for each pass the time of 13,000 tokens more. The forward and the
    backward pass do 6 operations per parameter, old logprobs of the second half and the reference 1.5 each."""
    experts = CONFIG | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    one = scenario(model={"config": experts}, reference={})
    active = one.model.shape.active
    assert timing.learn_token_s(one, "l40s", 2) == pytest.approx(6 * active / (2 * 85e12))
    assert timing.learn_token_s(one, "h100", 4) == pytest.approx(6 * active / (4 * 85e12))
    # An L4 does 121 TFLOP/s, and 0.24 of that as with dense models.
    assert timing.learn_token_s(one, "l4", 1) == pytest.approx(6 * active / (0.24 * 121e12), rel=0.01)
    assert timing.passes_s(one, "h100", 0.5) == pytest.approx((6 + 1.5 * 1.5) * active * 13_000 / 85e12)
    assert timing.passes_s(scenario(), "h100", 0.5) == 0.0
    layout = ScenarioLayout(one, ScenarioPlacementSpec())
    assert layout.learner().fixed_s == pytest.approx(2.0 + timing.passes_s(one, "l40s", 0.5))


def test_reference_and_critic_have_all_devices_of_the_learner_unless_the_scenario_says() -> None:
    """On one device of many, all others waited for the reference: static fleets then looked worse than they are."""
    for given, devices in (({}, 2), ({"devices": 1}, 1)):
        described = scenario(reference=given, critic=given)
        layout = ScenarioLayout(described, ScenarioPlacementSpec())
        _, *services = layout.services()
        assert [len(each.slot_setup.allocation.devices) for each in services] == [devices, devices]


def test_teachers_have_times_of_their_own_sizes_and_no_rewards_need_no_scoring() -> None:
    wide = CONFIG | {"intermediate_size": 4 * CONFIG["intermediate_size"]}
    teachers = [{"name": "same", "devices": 1}, {"name": "big", "devices": 1, "model": {"config": wide}}]
    described = scenario(reference={"devices": 1}, teachers=teachers, scoring=None)
    reference, same, big = ScenarioLayout(described, ScenarioPlacementSpec()).services()
    assert (same.function, big.function) == ("teacher_same", "teacher_big")
    assert same.token_s == reference.token_s
    assert (same.slot_setup.start_s, same.slot_setup.sleep_s) == (
        reference.slot_setup.start_s,
        reference.slot_setup.sleep_s,
    )
    shapes = [ScenarioModelSpec(config=config).shape for config in (CONFIG, wide)]
    assert big.token_s / same.token_s == pytest.approx(shapes[1].active / shapes[0].active)
    assert big.slot_setup.start_s > same.slot_setup.start_s


def test_a_simulated_run_bills_its_teachers() -> None:
    described = scenario(teachers=[{"name": "big"}], scoring=None, seeds=1, policies=[{"name": "cost_aware"}])
    (results,) = compare(described).results.values()
    trace = results[0].trace
    assert trace is not None
    calls = [call for call in trace.invocations if call.function == "teacher_big"]
    assert {(call.work, call.step) for call in calls} >= {(Work.LOGPROBS, 1)}
    assert sum(holding.end_s - holding.start_s for holding in trace.holdings if holding.function == "teacher_big") > 0


def test_devices_without_a_price_cost_nothing(tmp_path: Path) -> None:
    free = [{"kind": kind, "usd_per_hour": 0, "source": "own", "as_of": "2026-11-28"} for kind in ("l40s", "cpu-core")]
    (tmp_path / "prices.yaml").write_text(yaml.safe_dump({"cpu_kind": "cpu-core", "devices": free}))
    cluster = {**machines(), "prices": str(tmp_path / "prices.yaml")}
    policies = [{"name": name} for name in ("static_colocated", "cost_aware", "clairvoyant")]
    for contract in ({"type": "weighted"}, {"type": "fastest", "budget_usd": 1}, {"type": "cheapest", "deadline_s": 9}):
        rows = compare(scenario(cluster=cluster, policies=policies, contract=contract, seeds=1)).rows("all")
        assert [row.cost_ratio.mean for row in rows] == [1.0, 1.0, 1.0]
        assert all(row.regret is not None and math.isfinite(row.regret.mean) for row in rows)
    budget = {"type": "fastest", "budget": {"times": 1.0, "policy": "static_colocated"}}
    with pytest.raises(ContractError, match="what static_colocated costs is 0 USD: its devices have no price"):
        compare(scenario(cluster=cluster, policies=policies, contract=budget, seeds=1))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"the learner has 2 x l40s, and its state needs 4"):
        ScenarioLayout(scenario(model={"name": "qwen2.5-7b"}), ScenarioPlacementSpec())
    large = scenario(model={"name": "qwen2.5-32b"}, cluster=machines(devices_per_node=16))
    with pytest.raises(InputError, match=r"1 x l40s leaves KV memory for 0 tokens besides weights of 66 GB"):
        ScenarioLayout(large, ScenarioPlacementSpec()).actors()


def test_owned_and_spot_prices() -> None:
    owned = price_book(scenario(cluster=machines(tenure="owned", released_value=0.25))).device("l40s")
    assert owned.released_usd_per_hour == pytest.approx(0.75 * owned.usd_per_hour)
    spot = scenario(cluster={"machines": [{"kind": "h100", "devices_per_node": 2, "tenure": "spot"}]})
    assert price_book(spot).device("h100").usd_per_hour == 1.25
    assert ScenarioLayout(spot, ScenarioPlacementSpec()).actors()[0].spot_mean_s == pytest.approx(20 * 3600)
    with pytest.raises(InputError, match="l40s has no spot price"):
        price_book(scenario(cluster=machines(tenure="spot")))


def test_stragglers_are_the_last_devices() -> None:
    slow = scenario(cluster=machines(devices_per_node=4, stragglers=0.5, straggler_slowdown=2.0))
    assert [actor.slowdown for actor in ScenarioLayout(slow, ScenarioPlacementSpec()).actors()] == [1, 1, 2, 2]


def test_a_public_trace_is_cut_off_and_begins_elsewhere_for_each_seed(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:46.6805900,{10 + i},{100 + 50 * i}" for i in range(12)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    one = scenario(workload={"type": "azure", "path": str(tmp_path / "trace.csv")}, steps=3, policies=[{"name": "a"}])
    drawn = [batches(one, seed) for seed in range(3)]
    assert [batch.step for batch in drawn[0]] == [1, 2, 3]
    assert max(int(batch.response_tokens.max()) for batch in drawn[0]) == one.max_tokens
    assert len({each[0].prompt_ids for each in drawn}) > 1
    with pytest.raises(InputError, match="the workload has 3 steps of 4 prompts, and steps is 4"):
        batches(one.model_copy(update={"steps": 4}), 0)


def test_prompts_share_their_iterations() -> None:
    one = scenario(model={"name": "qwen2.5-7b"})
    packed, alone = timing.engine_model(one, "l40s"), timing._engine_model(one, "l40s")
    assert packed.iteration_s(8) == alone.iteration_s(8) + one.engine.runtime_s
    assert packed.prefill_s(2048) == pytest.approx(alone.prefill_s(2048))
    # Alone, 32 tokens cost the weights; among others, 32 of 2,048 parts.
    assert alone.prefill_s(32) > 10 * packed.prefill_s(32)
    assert packed.prefill_s(32) == pytest.approx(packed.prefill_s(2048) / 64, rel=0.05)  # less attention


def test_devices_of_ones_own(tmp_path: Path) -> None:
    table = yaml.safe_load((files("rlhfless.scaling") / "devices.yaml").read_text("utf-8"))
    sheet = next(device for device in table["devices"] if device["kind"] == "l40s")
    price = {"usd_per_hour": 1.0, "source": "a bill", "as_of": "2026-11-01"}
    mine = sheet | {"kind": "mine", "memory_bytes": {"value": 96e9, "source": "its box"}, "price": price}
    (tmp_path / "devices.yaml").write_text(yaml.safe_dump({"devices": [mine]}))
    own = {"machines": [{"kind": "mine", "devices_per_node": 2}], "devices": "devices.yaml"}
    loaded = load_scenario(written(tmp_path, cluster=own))
    assert price_book(loaded).device("mine").usd_per_hour == 1.0
    plain = timing.kv_tokens(scenario(), "l40s")
    assert timing.kv_tokens(loaded, "mine") > plain
    assert ScenarioLayout(loaded, ScenarioPlacementSpec()).actors()[0].slot_setup.allocation.devices[0].kind == "mine"
    del mine["link_bytes_per_s"]
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump({"devices": [mine]}))
    with pytest.raises(InputError, match="link_bytes_per_s"):
        load_scenario(written(tmp_path, cluster=own | {"devices": "broken.yaml"}))


def test_weights_and_kv_of_8_bits() -> None:
    plain, small, halved = (
        scenario(model={"name": "qwen2.5-7b"}, engine={"reserved_gb": 3.9, **bits})
        for bits in ({}, {"weight_bits": 8}, {"weight_bits": 8, "kv_bits": 8})
    )
    kept = 2 * plain.model.shape.head  # numbers of embedding and head, which stay in 16 bits
    saved = plain.model.shape.total_bytes / 2 - kept
    weights = plain.model.shape.total_bytes - saved
    # 48 GB x 0.85 less 3.9 GB and the weights; a token's KV takes 57,344 bytes, or half.
    assert timing.kv_tokens(small, "l40s") == int((48e9 * 0.85 - 3.9e9 - weights) / 57_344)
    assert timing.kv_tokens(halved, "l40s") == int((48e9 * 0.85 - 3.9e9 - weights) / 28_672)
    models = [timing.engine_model(one, "l40s") for one in (plain, small, halved)]
    assert models[0].iteration_s(1) - models[1].iteration_s(1) == pytest.approx(saved / (864e9 * 0.81))
    assert models[2].context_s == pytest.approx(models[1].context_s / 2)
    kernels = scenario(engine={"weight_bits": 8, "latency": {"type": "kernels"}})
    with pytest.raises(InputError, match="weights of 8 bits multiplied in 16 have no table"):
        timing.engine_model(kernels, "l40s")


def test_weights_come_at_the_rate_of_the_slower_of_wire_and_engine() -> None:
    rates = [{}, {"load_bytes_per_s": 9e9}, {"broadcast_bytes_per_s": 1e9}]
    assert [TransportSpec(kind="nccl", **rate).device_bytes_per_s for rate in rates] == [4.3e9, 6.4e9, 1e9]
    assert TransportSpec(broadcast_bytes_per_s=1e9).device_bytes_per_s == 4.3e9
    slow = scenario(transport={"load_bytes_per_s": 1e9, "fixed_s": 0.0})
    made = setup(slow, ScenarioLayout(slow, ScenarioPlacementSpec()), 0)
    assert made.transport.load_s == pytest.approx(slow.model.shape.total_bytes / 1e9)
    assert made.learner.publish_s == pytest.approx(slow.model.shape.total_bytes / 4.5e9)


def test_products_of_8_bits_and_ranks_that_spread_the_experts() -> None:
    """An L40S multiplies 733 / 362 as fast in 8 bits, but for the head; an A100 has no such rate."""
    plain, fast = (scenario(model={"name": "qwen2.5-7b"}, engine={"product_bits": bits}) for bits in (16, 8))
    slow_s, fast_s = (timing.engine_model(one, "l40s").iteration_s(4096) for one in (plain, fast))
    shape, rate = plain.model.shape, 362e12 * 0.61
    saved_s = 2 * (shape.active - shape.head) * 4096 / rate * (1 - 362 / 733)
    assert slow_s - fast_s == pytest.approx(saved_s)
    with pytest.raises(InputError, match="no rate of a100-80gb"):
        timing.engine_model(fast, "a100-80gb")
    wide = scenario(cluster={"machines": [{"kind": "l40s", "devices_per_node": 4}]}, engine={"data_parallel": 2})
    assert len(ScenarioLayout(wide, ScenarioPlacementSpec()).actors()) == 2
    assert timing.kv_tokens(wide, "l40s") == 2 * timing.kv_tokens(scenario(), "l40s")


def test_an_engine_that_speculates_draws_the_same_tokens_sooner() -> None:
    """Every sequence has two drafts a pass, and keeps one of them: with an eighth of a millisecond for finding those of
    a place. The small model's pass takes as long over 24 tokens as over 8."""
    drafts = {"accepted": [0.6, 0.4], "depth": 2, "draft_s": 0.000125, "source": "by hand"}
    policies = [{"name": "static_colocated"}]
    plain = scenario(policies=policies)
    drafting = scenario(policies=policies, engine={"speculation": drafts})
    slow, fast = (timing.engine_model(one, "l40s") for one in (plain, drafting))
    assert slow.iteration_s(8) == slow.iteration_s(24)
    assert fast.iteration_s(8) == pytest.approx((slow.iteration_s(24) + 0.00025) / 2)
    before, after = (compare(one).results["static_colocated"] for one in (plain, drafting))
    for one, other in zip(before, after, strict=True):
        for step, sooner in zip(one.steps, other.steps, strict=True):
            assert sooner.response_tokens == step.response_tokens
            assert sooner.time_s < step.time_s


@pytest.mark.parametrize("policy", ["static_colocated", "cost_aware"])
def test_the_depth_that_follows_the_batch_is_as_good_as_any_fixed_one(policy: str) -> None:
    """Long contexts, of which all tokens of a pass share the reading: priced as at the depth of a full batch of 256,
    `auto` took 3 % longer than four drafts."""
    changes: dict[str, Any] = {
        "cluster": {"machines": [{"kind": "h100", "devices_per_node": 4}]},
        "model": {"name": "qwen2.5-7b"},
        "max_tokens": 8192,
        "prompts_per_step": 16,
        "samples_per_prompt": 16,
        "workload": values()["workload"]
        | {"lengths": {"median_tokens": 3000, "spread": 0.8, "persistence": 0.6}, "prompts": 32},
        "policies": [{"name": policy}],
        "seeds": 1,
    }
    drafts = {"accepted": [0.7, 0.5, 0.4, 0.3], "draft_s": 0.0003, "source": "by hand"}
    drafting = [{"speculation": drafts | {"depth": depth}} for depth in ("auto", 1, 2, 4)]
    runs = [compare(scenario(**changes, engine=engine)).results[policy] for engine in (*drafting, {})]
    auto_s, *others_s = (sum(step.time_s for run in results for step in run.steps) for results in runs)
    assert auto_s <= 1.01 * min(others_s)


def test_what_a_framework_adds_to_each_generation_by_hand() -> None:
    plain, slow = (scenario(engine={"step_s": seconds}, seeds=1) for seconds in (0, 20))
    loads = [ScenarioLayout(each, ScenarioPlacementSpec()).transport(fixed=False).load_s for each in (plain, slow)]
    assert loads[1] - loads[0] == pytest.approx(20)
    runs = [compare(each, ["static_colocated"]).results["static_colocated"][0].steps for each in (plain, slow)]
    for before, after in zip(*runs, strict=True):
        assert after.step_s - before.step_s == pytest.approx(20)


def test_serverless_containers_by_hand() -> None:
    """A restore of 3 s, and the state's bytes by 2 devices and 1e9 a second, before and after the learner's work."""
    seller = {"premium": 1.5, "restore_s": 3, "state_bytes_per_s": 1e9}
    apart = {"mode": "disaggregated", "learner_devices": 2}
    described = scenario(cluster={**machines(nodes=2), "serverless": seller}, placement=apart)
    state_s = timing.state_bytes(described) / 2 / 1e9
    layout = ScenarioLayout(described, described.placement)
    assert layout.learner().paid_around == pytest.approx((3 + state_s, state_s))
    assert {shape.slot_setup.start_s for shape in (*layout.actors(), layout.learner())} == {3}
    plain = load_price_book(None).device("l40s").usd_per_hour
    assert price_book(described).device("l40s").usd_per_hour == pytest.approx(1.5 * plain)
    assert price_book(described).device("l40s").rented_by == "device"


def test_a_released_learner_is_paid_for_around_its_work() -> None:
    held = [
        Holding("learner", "learner-0", "a", "l40s-1", "l40s", 1.0, ReplicaState.SERVING, 0.0, 100.0),
        Holding("generation", "generation-0", "b", "l40s-0", "l40s", 1.0, ReplicaState.SERVING, 0.0, 100.0),
    ]
    calls = [
        Invocation("learner", "learner-0", "a", work, step, start_s, end_s)
        for step, work, start_s, end_s in (
            (1, Work.LEARN, 2.0, 10.0),  # begins before it could have been restored
            (2, Work.EVALUATE, 40.0, 42.0),
            (2, Work.LEARN, 44.0, 50.0),  # so soon after that it stays
            (3, Work.LEARN, 90.0, 99.0),
        )
    ]
    paid = by_use(held, calls, before_s=5.0, after_s=2.0)
    spans = [(each.start_s, each.end_s) for each in paid if each.function == "learner"]
    assert spans == [(0.0, 12.0), (35.0, 52.0), (85.0, 100.0)]
    assert [each for each in paid if each.function == "generation"] == held[1:]


def test_a_released_learner_costs_time_where_generation_is_shorter_than_its_return() -> None:
    """Generation of 0.8 s hides a return of 0.1 s, and not one of 100 s."""
    apart, runs = {"mode": "disaggregated", "learner_devices": 2}, {}
    for restore_s in (0.0, 0.1, 100.0):
        seller = {"restore_s": restore_s, "state_bytes_per_s": 1e15}
        one = scenario(
            cluster={**machines(nodes=2), "serverless": seller}, placement=apart, policies=[{"name": "static"}], seeds=1
        )
        runs[restore_s] = compare(one).results["static"][0].steps[1:]
    for hidden, plain, late in zip(runs[0.1], runs[0.0], runs[100.0], strict=True):
        assert plain.generation_s > 0.1
        assert hidden.step_s == pytest.approx(plain.step_s)
        assert late.step_s > 100.0 > plain.step_s


def test_machines_of_a_seller_have_no_count() -> None:
    """4 prompts a step, an actor of one device for each, and 2 devices of the learner: 3 machines of 2."""
    apart = {"mode": "disaggregated", "learner_devices": 2}
    one = scenario(cluster={**machines(), "serverless": {}}, placement=apart)
    assert one.cluster.machines[0].nodes == 3
    assert len(ScenarioLayout(one, one.placement).actors()) == 4
    counted = scenario(cluster={**machines(nodes=2), "serverless": {}}, placement=apart)
    assert counted.cluster.machines[0].nodes == 2
    assert scenario(cluster=machines()).cluster.machines[0].nodes == 1


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"reacquire_s": 30}, "rented by the second, each by itself, and reacquire_s says otherwise"),
        ({"billing": {"granularity_s": 60}}, "and billing says otherwise"),
        ({"machines": [{"kind": "l40s", "devices_per_node": 2, "rented_by": "node"}]}, "machines.l40s says otherwise"),
    ],
)
def test_serverless_containers_are_rented_each_by_itself(cluster: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        scenario(cluster={**machines(), **cluster, "serverless": {}})


def test_serverless_functions_share_no_device() -> None:
    with pytest.raises(InputError, match="co-located functions share devices"):
        ScenarioLayout(scenario(cluster={**machines(), "serverless": {}}), ScenarioPlacementSpec())


def test_a_simulated_run_bills_its_judges() -> None:
    wide = CONFIG | {"intermediate_size": 4 * CONFIG["intermediate_size"]}
    judges = [{"name": "quick"}, {"name": "wordy", "answer_tokens": 100, "model": {"config": wide}}]
    described = scenario(judges=judges, scoring=None, seeds=1, policies=[{"name": "cost_aware"}])
    quick, wordy = ScenarioLayout(described, ScenarioPlacementSpec()).services()
    assert (quick.function, wordy.function) == ("judge_quick", "judge_wordy")
    assert (len(quick.slot_setup.allocation.devices), quick.work) == (1, Work.SCORE)
    assert wordy.token_s > quick.token_s
    assert wordy.group_s > 100 * quick.group_s > 0
    (results,) = compare(described).results.values()
    trace = results[0].trace
    assert trace is not None
    for name in ("judge_quick", "judge_wordy"):
        assert {(call.work, call.step) for call in trace.invocations if call.function == name} >= {(Work.SCORE, 1)}
        assert sum(holding.end_s - holding.start_s for holding in trace.holdings if holding.function == name) > 0
