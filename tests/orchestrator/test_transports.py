"""The choice of a weight transport, and the refusal, with a reason, of one that cannot work at an actor's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.fleet.replica import Replica
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.launch import TransportRefused, transport_of
from rlhfless.records import Decision, FunctionName
from rlhfless.scaling.placement import Allocation, Device, DeviceGroup, Placement
from rlhfless.spec import RunSpec
from rlhfless.util.clock import VirtualClock


def spec(joined: bool = False, **weights: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p"},
            "rewards": [{"type": "exact_match"}],
            "scaling": {"generation": {"min_actors": 2, "max_actors": 2}},
            "placement": {"ray_address": "ray://somewhere"} if joined else {},
            "weights": weights,
        }
    )


def placed(kind: str, learner: list[int], *actors: list[int]) -> Placement:
    def on(numbers: list[int]) -> Allocation:
        return Allocation.of([Device(f"{kind}-{number}", kind, number) for number in numbers])

    return Placement({FunctionName.LEARNER: (on(learner),), FunctionName.GENERATION: tuple(map(on, actors))}, ())


CORES = placed("cpu-core", [0], [1], [2])

APART = placed("h100", [0, 1], [0], [1])

ON_TWO_NODES = replace(
    APART,
    groups=tuple(
        DeviceGroup(f"group-{number}", (device,), f"node-{number}")
        for number, device in enumerate(APART.allocation(FunctionName.LEARNER, 0).devices)
    ),
)


def test_auto_goes_by_where_the_actors_may_be(tmp_path: Path) -> None:
    assert transport_of(spec(), CORES) == "shared_memory"
    assert transport_of(spec(folder="/proc"), CORES) == "file"
    assert transport_of(spec(joined=True), CORES) == "http"
    assert transport_of(spec(transport="file", folder=str(tmp_path)), CORES) == "file"


@pytest.mark.parametrize(
    ("transport", "placement", "why"),
    [
        ("nccl", CORES, "cpu-core-1 is a CPU core"),
        ("cuda_ipc", CORES, "cpu-core-1 is a CPU core"),
        ("cuda_ipc", placed("h100", [0], [0], [1]), "actor 1 is on h100-1, where the learner, on h100-0, has no rank"),
        ("cuda_ipc", ON_TWO_NODES, "the learner's ranks are on 2 nodes, and it works on one"),
        ("nccl", placed("h100", [0], [0], [1]), "actor 0 and the learner's first rank share h100-0"),
    ],
)
def test_a_transport_between_gpus_that_cannot_work_is_refused(transport: str, placement: Placement, why: str) -> None:
    with pytest.raises(TransportRefused, match=why) as refused:
        transport_of(spec(transport=transport), placement)
    assert str(refused.value).startswith(f"weights.transport is {transport}, but ")
    assert str(refused.value).endswith("; set weights.transport to auto")


def test_transports_between_gpus_are_taken_where_they_work() -> None:
    assert transport_of(spec(transport="nccl"), placed("h100", [0, 1], [1], [2])) == "nccl"
    assert transport_of(spec(transport="cuda_ipc"), placed("h100", [0], [0])) == "cuda_ipc"
    assert transport_of(spec(transport="cuda_ipc"), placed("h100", [0, 1, 2, 3], [0, 1], [2, 3])) == "cuda_ipc"


def test_shared_memory_that_is_none_is_refused() -> None:
    with pytest.raises(TransportRefused, match="'/proc' is not in memory; set it to file"):
        transport_of(spec(transport="shared_memory", folder="/proc"), CORES)


async def test_the_trace_says_how_an_actor_gets_its_weights_and_when_that_changes(
    caplog: pytest.LogCaptureFixture, clock: VirtualClock
) -> None:
    caplog.set_level("INFO")
    recorder: Any = SimpleNamespace(decisions=[], add_holding=lambda _: None)
    recorder.add_decision = recorder.decisions.append
    cores = CORES.allocation(FunctionName.GENERATION, 0)
    actor = Replica("generation-0", FunctionName.GENERATION, cores, recorder)
    for step, transport in enumerate(("http", "http", None, "nccl")):
        clock.now_s = 5.0 + step
        actor.record_transport(Call("run", 1, step), transport)
    assert recorder.decisions == [
        Decision(0, 5.0, "transport", "generation-0", {"transport": "http"}),
        Decision(3, 8.0, "transport", "generation-0", {"transport": "nccl"}),
    ]
    assert "generation-0 loads weights by http" in caplog.text
