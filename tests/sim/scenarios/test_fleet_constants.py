"""A simulated fleet can do what the live one can, in the times that were declared or measured, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from fakes.tiny_scenario import scenario
from rlhfless.records import FunctionName, FunctionRole, Invocation, SleepTier, Work
from rlhfless.scaling import fleet_constants
from rlhfless.scaling.fleet_constants import TIERS, Prior, SimulatedTransport
from rlhfless.scaling.function_specs import declared, no_phases
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.replay.calibrate import turns_of
from rlhfless.sim.replay.latency_file import EngineFit, LatencyFile, LineFit, TurnFit, write_latency
from rlhfless.sim.scenarios.build import ScenarioLayout, setup
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.sim.setup import Setup
from rlhfless.spec import WeightsSpec
from rlhfless.spec.errors import InputError

MEASURED = LatencyFile(
    traces=("mine",),
    steps=1,
    device_kind="l40s",
    generation=EngineFit(
        fixed_s=0.01, sequence_s=(0.0, 0.0, 0.0), context_s=0.0, prefill_token_s=0.0, prefill_context_s=0.0
    ),
    call_s=0.0,
    load_weights_s=1.5,
    start_s=40.0,
    starts={"scoring": 3.0},
    turns={"generation": TurnFit(sleep_s=0.2, wake_s=0.0), "learner": TurnFit(sleep_s=1.1, wake_s=0.6)},
    group_s=0.0,
    learn=LineFit(fixed_s=1.0),
    publish_s=0.7,
    driver_s=0.0,
    mean_s={},
)


def made(described: Scenario, mode: str = "colocated", *, reserved: bool = False) -> Setup:
    placement = ScenarioPlacementSpec.model_validate({"mode": mode})
    return setup(described, ScenarioLayout(described, placement), 0, reserved=reserved)


def test_every_prior_says_where_it_is_from_and_when() -> None:
    priors = [value for value in vars(fleet_constants).values() if isinstance(value, Prior)]
    assert len(priors) == 7
    assert all(prior.value > 0 and prior.source and prior.as_of.year >= 2025 for prior in priors)


def test_functions_sleep_where_their_kinds_hold_memory_and_actors_alone_drop_weights() -> None:
    for kind in declared().values():
        if kind.phases is not no_phases and kind.role is not FunctionRole.PREFILLS:  # prefill refuses turns
            assert TIERS[kind.role] is (SleepTier.DROPPED if kind.role is FunctionRole.SAMPLES else SleepTier.HOST), (
                kind.name
            )


def test_ways_of_the_weights_are_those_of_a_run() -> None:
    asked = WeightsSpec.model_fields["transport"].annotation
    live = {name for part in get_args(asked) for name in get_args(part)}
    assert set(get_args(SimulatedTransport)) <= live


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transport", {"kind": "p2p"}),  # actors do not pass weights on
        ("transport", {"kind": "folder"}),
        ("cluster", {"keeps_sleepers": True}),  # what slept on a device that was given back is gone
        ("placement", {"mode": "hybrid"}),  # turns are of whole phases
        ("learner", {"released": True}),
        ("fleet", {"type": "declared", "generation": {"wake_s": 0.0}}),  # priors are not a scenario's to change
    ],
)
def test_a_scenario_cannot_give_a_fleet_what_the_runtime_cannot_do(key: str, value: dict[str, Any]) -> None:
    known = scenario().model_dump(mode="json")
    with pytest.raises(ValidationError, match=key):
        Scenario.model_validate(known | {key: known[key] | value if key != "fleet" else value})


def test_a_broadcast_needs_actors_that_stay_and_gpus_of_their_own() -> None:
    broadcast = scenario(transport={"kind": "nccl"})
    fixed = made(broadcast, "disaggregated", reserved=True)
    assert fixed.transport.home is None
    for mode, reserved, told in (("colocated", True, "on one GPU"), ("disaggregated", False, "never released")):
        with pytest.raises(InputError, match=told):
            made(broadcast, mode, reserved=reserved)


def test_declared_times_by_hand() -> None:
    """A learner of 16 bytes per parameter on two L40S, each with its own link to the host."""
    declared_times = made(scenario())
    shape, link = scenario().model.shape, scenario().cluster.sheet("l40s").host_bytes_per_s.value
    (turn,) = {(one.slot_setup.sleep_s, one.slot_setup.wake_s) for one in declared_times.actors}
    assert turn == (0.1, 0.1)
    learner = declared_times.learner.slot_setup
    assert learner.sleep_s == learner.wake_s == pytest.approx(16 * shape.parameters / (2 * link))
    assert declared_times.learner.publish_s == pytest.approx(0.2 + shape.total_bytes / 4.5e9)


def test_measured_times_take_the_place_of_priors(tmp_path: Path) -> None:
    write_latency(MEASURED, tmp_path / "latency.yaml")
    described = scenario(fleet={"type": "measured", "path": str(tmp_path / "latency.yaml")})
    measured, declared_times = made(described), made(scenario())
    actor, learner = measured.actors[0].slot_setup, measured.learner.slot_setup
    assert (actor.start_s, actor.sleep_s, actor.wake_s) == (40.0, 0.2, 0.0)
    assert (learner.sleep_s, learner.wake_s) == (1.1, 0.6)
    assert learner.start_s == declared_times.learner.slot_setup.start_s  # it was not measured
    assert measured.services[0].slot_setup.start_s == 3.0
    assert (measured.transport.load_s, measured.learner.publish_s) == (1.5, 0.7)
    slow = MEASURED.model_copy(update={"turns": {"learner": TurnFit(sleep_s=5.0, wake_s=5.0)}})
    write_latency(slow, tmp_path / "slow.yaml")
    other = described.model_copy(
        update={"fleet": described.fleet.model_copy(update={"path": str(tmp_path / "slow.yaml")})}
    )
    first, second = (compare(one).results["static_colocated"][0].steps[-1].time_s for one in (described, other))
    assert second - first == pytest.approx(5.0 + 5.0 - 1.1 - 0.6 + (0.1 - 0.2) + 0.1)


def test_a_ledger_tells_the_seconds_of_turns() -> None:
    call = Invocation("learner", "learner-0", "i", Work.SLEEP, 1, 10.0, 10.5)
    calls = [
        call,
        dataclasses.replace(call, end_s=11.5),
        dataclasses.replace(call, end_s=10.7),
        dataclasses.replace(call, work=Work.WAKE, end_s=10.25),
        dataclasses.replace(call, function=FunctionName.GENERATION, end_s=10.125),
        dataclasses.replace(call, work=Work.LEARN, end_s=20.0),
    ]
    assert {name: (fit.sleep_s, fit.wake_s) for name, fit in turns_of(calls).items()} == {
        "generation": (0.125, 0.0),  # an actor wakes as it loads
        "learner": (pytest.approx(0.7), 0.25),
    }
