"""Space requirements per node of a cluster, and the refusal of a run before anything starts on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.orchestrator import launch
from rlhfless.planning.host_memory import Needed, Room
from rlhfless.records import FunctionName
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import GIB
from rlhfless.scaling.placement import Allocation, Node
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError

NODES = [Node(name, f"10.0.0.{number}", 8, 8) for number, name in enumerate(("a", "b", "c"))]
SHAPE = ModelShape.of_config(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
)
PREPARED: Any = SimpleNamespace(shape=SHAPE, max_model_len=128, resolved=None)
SPEC = RunSpec.model_validate(
    {
        "model": {"path": "m", "dtype": "bfloat16"},
        "prompts": {"path": "p"},
        "rewards": [{"type": "exact_match"}],
        "placement": {"ray_address": "ray://somewhere"},
    }
)


def placed(learner: str, *actors: str) -> Any:
    """Return a learner with one core on a node, and actors with one core each."""

    def allocation(node: str) -> Allocation:
        return SimpleNamespace(devices=(SimpleNamespace(node=node, kind="cpu-core", name=node),))  # type: ignore[return-value]

    allocations = {
        FunctionName.LEARNER: (allocation(learner),),
        FunctionName.GENERATION: tuple(map(allocation, actors)),
    }
    return SimpleNamespace(allocations=allocations, groups=(), allocation=lambda name, index: allocations[name][index])


def test_the_learners_node_keeps_the_store_and_other_actors_nodes_a_cache() -> None:
    size = 2 * SHAPE.parameters
    assert launch.needed_by_node(SPEC, PREPARED, placed("a", "a", "b")) == {
        "a": Needed(size, 3),
        "b": Needed(size, 3),
    }
    assert launch.needed_by_node(SPEC, SimpleNamespace(shape=None), placed("a", "b")) == {}  # type: ignore[arg-type]


async def test_a_run_for_which_a_node_has_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    rooms: dict[str, object] = {node.address: Room("/dev/shm", GIB, True, GIB) for node in NODES}

    def on_each_node(work: Any, *arguments: Any, timeout_s: float) -> dict[str, object]:
        asked.append((work.__name__, *arguments))
        assert timeout_s == launch.ROOM_S
        return rooms

    monkeypatch.setattr(launch, "on_each_node", on_each_node)
    await launch.require_room(SPEC, PREPARED, placed("a", "b"), NODES, [])
    assert asked == [("room_at", "/dev/shm", [])]
    rooms["10.0.0.1"] = Room("/dev/shm", 64, True, GIB)
    with pytest.raises(InputError, match=r"node 10.0.0.1: '/dev/shm' has .* free, and up to 3 versions") as refused:
        await launch.require_room(SPEC, PREPARED, placed("a", "b"), NODES, [])
    assert [problem.where for problem in refused.value.problems] == ["weights.folder"]
    del rooms["10.0.0.1"]  # a node that does not answer is not checked
    await launch.require_room(SPEC, PREPARED, placed("a", "b"), NODES, [])
