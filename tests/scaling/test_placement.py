"""Allocations: which replica sits where, and that no device is sold twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import FunctionName, ReplicaState
from rlhfless.scaling.function_specs import kinds_of
from rlhfless.scaling.placement import (
    HeldGroup,
    Node,
    Placement,
    PlacementError,
    ReplicaRequest,
    Site,
    device_kind,
    place,
    with_held,
)
from rlhfless.spec import PlacementSpec, RunSpec


def gpus(name: str, count: int, free: int | None = None, kind: str = "h100", cores: int = 16) -> Node:
    return Node(name, name, cores, cores, kind, count, count if free is None else free)


def cpus(count: int) -> Node:
    return Node("cpus", "cpus", count, count)


def placed(
    spec: PlacementSpec, *nodes: Node, actors: int = 1, per_actor: int = 1, ranks: int = 1, scoring_cores: int = 1
) -> Placement:
    functions = [
        ReplicaRequest(FunctionName.GENERATION, Site.PER_REPLICA, actors, per_actor),
        ReplicaRequest(FunctionName.SCORING, Site.CPU, devices=scoring_cores),
        ReplicaRequest(FunctionName.REFERENCE, Site.LEARNER_SHARED),
        ReplicaRequest(FunctionName.LEARNER, Site.LEARNER, ranks=ranks, ranks_key="learner.ranks"),
    ]
    return place(spec, nodes, functions)


def names(placement: Placement, function: FunctionName) -> list[list[str]]:
    return [[device.name for device in allocation.devices] for allocation in placement.allocations[function]]


def test_colocated_functions_share_the_devices() -> None:
    placement = placed(PlacementSpec(), cpus(2), actors=2)
    assert names(placement, FunctionName.GENERATION) == [["cpu-0"], ["cpu-1"]]
    assert names(placement, FunctionName.LEARNER) == [["cpu-0", "cpu-1"]]
    assert names(placement, FunctionName.SCORING) == [["cpu-1"]]
    assert names(placement, FunctionName.REFERENCE) == [["cpu-0"]]
    # cpu-0: an actor, the learner, the reference; cpu-1: an actor, the learner, scoring.
    assert placement.allocation(FunctionName.GENERATION, 1).shares == pytest.approx((1 / 3,))
    assert placement.allocation(FunctionName.LEARNER, 0).shares == pytest.approx((1 / 3, 1 / 3))
    # The learner has them all, so they are taken and given back together.
    assert [len(group.devices) for group in placement.groups] == [2]


def test_replicas_on_cores_have_cores_of_their_own_beside_gpus() -> None:
    """Three of an environment with two cores each, and scoring with one."""
    functions = [
        ReplicaRequest(FunctionName.GENERATION, Site.PER_REPLICA),
        ReplicaRequest(FunctionName.ENVIRONMENT, Site.CPU, 3, devices=2),
        ReplicaRequest(FunctionName.SCORING, Site.CPU),
        ReplicaRequest(FunctionName.LEARNER, Site.LEARNER),
    ]
    placement = place(PlacementSpec(), [gpus("a", 1)], functions)
    assert names(placement, FunctionName.ENVIRONMENT) == [["cpu-0", "cpu-1"], ["cpu-2", "cpu-3"], ["cpu-4", "cpu-5"]]
    assert names(placement, FunctionName.SCORING) == [["cpu-6"]]
    assert placement.allocation(FunctionName.ENVIRONMENT, 2).shares == (1.0, 1.0)
    own = {group.name: len(group.devices) for group in placement.groups}
    assert own == {"learner-0": 1, "environment-0": 2, "environment-1": 2, "environment-2": 2, "scoring-0": 1}
    shared = place(PlacementSpec(), [cpus(2)], functions)
    assert names(shared, FunctionName.ENVIRONMENT) == [["cpu-1"], ["cpu-0"], ["cpu-1"]]


@pytest.mark.parametrize(
    ("devices", "nodes", "expected"),
    [
        (2, [gpus("a", 2, 0), gpus("b", 2, 0), gpus("c", 4)], {"learner-4": "a", "learner-1": "a"}),
        (2, [gpus("b", 2, 0), gpus("c", 4)], {"learner-2": "b", "learner-3": "b"}),
        (4, [gpus("b", 2, 0), gpus("c", 4)], {"learner-2": "b", "learner-3": "b", "learner-0": "c", "learner-5": "c"}),
        (3, [gpus("c", 4)], {"learner-0": "c", "learner-5": "c", "learner-6": "c"}),
    ],
    ids=["shrinks", "leaves a node", "moves to another", "has lost all nodes"],
)
def test_an_elastic_run_keeps_the_devices_that_it_holds(
    devices: int, nodes: list[Node], expected: dict[str, str]
) -> None:
    """It holds two devices of each of the nodes a and b, which have no others; c has four free ones."""
    held = [HeldGroup(f"learner-{i}", node, "h100", 1) for i, node in ((4, "a"), (1, "a"), (2, "b"), (3, "b"))]
    functions = [
        ReplicaRequest(FunctionName.GENERATION, Site.PER_REPLICA, devices),
        ReplicaRequest(FunctionName.LEARNER, Site.LEARNER, ranks=devices),
    ]
    spec = PlacementSpec(devices=devices, ray_address="auto")
    placement = place(spec, with_held(nodes, held), functions, held)
    assert {group.name: group.node for group in placement.groups} == expected
    assert [len(placement.groups_of(each)) for each in placement.allocations[FunctionName.GENERATION]] == [1] * devices


def test_groups_of_an_elastic_run_have_the_devices_of_an_actor() -> None:
    functions = [
        ReplicaRequest(FunctionName.GENERATION, Site.PER_REPLICA, 3, 2),
        ReplicaRequest(FunctionName.LEARNER, Site.LEARNER, ranks=7),
    ]
    groups = place(PlacementSpec(), [gpus("a", 7)], functions, []).groups
    assert [(group.name, len(group.devices)) for group in groups] == [
        ("learner-0", 2), ("learner-1", 2), ("learner-2", 2), ("learner-3", 1),
    ]  # fmt: skip


def test_engines_that_prefill_have_devices_of_their_own() -> None:
    engines = [
        ReplicaRequest(FunctionName.GENERATION, Site.PER_REPLICA, 2, 2),
        ReplicaRequest(FunctionName.PREFILL, Site.PER_REPLICA, 1, 2),
        ReplicaRequest(FunctionName.LEARNER, Site.LEARNER),
    ]
    apart = place(PlacementSpec(mode="disaggregated", learner_devices=2), [gpus("n", 8)], engines)
    assert names(apart, FunctionName.GENERATION) == [["gpu-0", "gpu-1"], ["gpu-2", "gpu-3"]]
    assert names(apart, FunctionName.PREFILL) == [["gpu-4", "gpu-5"]]
    assert [group.name for group in apart.groups] == ["generation-0", "generation-1", "generation-2", "learner-0"]
    with pytest.raises(
        PlacementError, match=r"generation.max_actors is 2 and scaling.prefill.max_actors is 1, .*for 2"
    ):
        place(PlacementSpec(), [gpus("n", 4)], engines)
    shared = place(PlacementSpec(), [cpus(4)], engines)
    assert names(shared, FunctionName.PREFILL) == [["cpu-0", "cpu-1"]]


def test_on_devices_that_runs_share_what_is_awake_pays_for_all_of_a_device_and_what_sleeps_for_nothing() -> None:
    spec = PlacementSpec(mode="disaggregated", devices=2, tenants=2)
    allocations = placed(spec, cpus(2)).allocations
    (learner,), (scoring,) = allocations[FunctionName.LEARNER], allocations[FunctionName.SCORING]
    assert [share for _, share in learner.billed(ReplicaState.SERVING)] == [1.0]
    assert [share for _, share in learner.billed(ReplicaState.SLEEPING)] == [0.0]
    assert [share for _, share in scoring.billed(ReplicaState.SERVING)] == [0.0], (
        "it takes no turn on the learner's core"
    )
    (own,) = placed(spec, gpus("a", 2)).allocations[FunctionName.SCORING]
    assert [share for _, share in own.billed(ReplicaState.SERVING)] == [1.0], "cores of its own"
    (alone,) = placed(PlacementSpec(mode="colocated", devices=2), cpus(2)).allocations[FunctionName.REFERENCE]
    assert {share for _, share in alone.billed(ReplicaState.SLEEPING)} == {1 / 3}, "nothing else works there meanwhile"


def test_disaggregated_sides_share_nothing() -> None:
    placement = placed(PlacementSpec(mode="disaggregated", learner_devices=2), cpus(5), actors=3, ranks=2)
    assert names(placement, FunctionName.GENERATION) == [["cpu-0"], ["cpu-1"], ["cpu-2"]]
    assert names(placement, FunctionName.LEARNER) == [["cpu-3", "cpu-4"]]
    assert placement.allocation(FunctionName.GENERATION, 0).shares == (1,)
    # cpu-3: the learner and the reference; cpu-4: the learner and scoring.
    assert placement.allocation(FunctionName.LEARNER, 0).shares == pytest.approx((1 / 2, 1 / 2))
    assert grouped(placement) == {
        "generation-0": ["cpu-0"],
        "generation-1": ["cpu-1"],
        "generation-2": ["cpu-2"],
        "learner-0": ["cpu-3", "cpu-4"],
    }


def grouped(placement: Placement) -> dict[str, list[str]]:
    return {group.name: [device.name for device in group.devices] for group in placement.groups}


def test_tensor_parallel_actors_take_neighbours() -> None:
    placement = placed(PlacementSpec(), gpus("a", 4), actors=2, per_actor=2)
    assert names(placement, FunctionName.GENERATION) == [["gpu-0", "gpu-1"], ["gpu-2", "gpu-3"]]


def test_more_actors_than_cores_take_turns() -> None:
    placement = placed(PlacementSpec(), cpus(2), actors=3)
    assert names(placement, FunctionName.GENERATION) == [["cpu-0"], ["cpu-1"], ["cpu-0"]]
    # cpu-0 has two actors, the learner and the reference; cpu-1 an actor, the learner and scoring.
    assert placement.allocation(FunctionName.LEARNER, 0).shares == (1 / 4, 1 / 3)


def test_two_engines_on_one_gpu_are_refused() -> None:
    with pytest.raises(
        PlacementError,
        match=r"scaling.generation.max_actors is 3, with 1 device\(s\) each, but generation has 2 device\(s\) of kind "
        r"h100, enough for 2 actor\(s\); lower it, or raise placement.devices",
    ):
        placed(PlacementSpec(), gpus("a", 2), actors=3)


def test_scoring_has_cores_where_the_devices_are_gpus() -> None:
    placement = placed(PlacementSpec(), gpus("a", 2), actors=2, scoring_cores=4)
    assert names(placement, FunctionName.SCORING) == [["cpu-0", "cpu-1", "cpu-2", "cpu-3"]]
    assert {device.kind for device in placement.allocation(FunctionName.SCORING, 0).devices} == {"cpu-core"}
    # Nothing but the actor, the learner and, on the last device, the reference is on a GPU.
    assert placement.allocation(FunctionName.LEARNER, 0).shares == (1 / 2, 1 / 3)
    few = placed(PlacementSpec(), gpus("a", 2, cores=3), actors=2, scoring_cores=4)
    assert len(few.allocation(FunctionName.SCORING, 0).devices) == 3


# Three nodes: actors of two devices fit into 3 + 2 + 1 GPUs twice, and nowhere across two nodes.


def test_an_actor_is_on_one_node() -> None:
    nodes = gpus("a", 3), gpus("b", 2), gpus("c", 1)
    spec = PlacementSpec(mode="disaggregated", learner_devices=1)
    placement = placed(spec, *nodes, actors=2, per_actor=2)
    assert {group.name: (group.node, len(group.devices)) for group in placement.groups} == {
        "generation-0": ("a", 2),
        "generation-1": ("b", 2),
        "learner-0": ("c", 1),
        "scoring-0": ("", 1),
    }
    with pytest.raises(PlacementError, match=r"is 4, but generation has 5 device\(s\), and not more than 3 of them"):
        placed(spec, *nodes, actors=1, per_actor=4)


def test_a_learner_that_fits_no_node_is_on_several() -> None:
    spec = PlacementSpec(mode="disaggregated", learner_devices=3)
    placement = placed(spec, gpus("a", 2), gpus("b", 2), actors=1, ranks=3)
    assert {group.name: (group.node, len(group.devices)) for group in placement.groups} == {
        "generation-0": ("a", 1),
        "learner-0": ("a", 1),
        "learner-1": ("b", 2),
        "scoring-0": ("", 1),
    }
    assert len(placement.groups_of(placement.allocation(FunctionName.LEARNER, 0))) == 2


def test_free_devices_are_planned_first() -> None:
    placement = placed(PlacementSpec(devices=2), gpus("a", 4, free=1), gpus("b", 4, free=3), actors=2)
    assert [group.node for group in placement.groups] == ["b", ""]
    both = placed(PlacementSpec(devices=7), gpus("a", 4, free=1), gpus("b", 4, free=3), actors=7)
    assert [(group.node, len(group.devices)) for group in both.groups[:2]] == [("b", 4), ("a", 3)]


def test_a_cluster_that_is_joined_may_grow() -> None:
    spec = PlacementSpec(devices=6, ray_address="head:6379")
    placement = placed(spec, gpus("a", 4), actors=3, per_actor=2)
    assert [(group.node, len(group.devices)) for group in placement.groups[:2]] == [("a", 4), ("", 2)]
    apart = PlacementSpec(mode="disaggregated", learner_devices=2, devices=6, ray_address="head:6379")
    placement = placed(apart, gpus("a", 3), gpus("b", 2), actors=1, per_actor=4)
    assert [(group.node, len(group.devices)) for group in placement.groups[:2]] == [("", 4), ("b", 2)]
    none_yet = PlacementSpec(devices=16, kind="h200", ray_address="head:6379")
    placement = placed(none_yet, gpus("a", 4), actors=2, per_actor=8)
    assert [(group.node, group.kind, len(group.devices)) for group in placement.groups[:2]] == [("", "h200", 8)] * 2


def test_an_actor_wider_than_any_node_waits_for_one_that_holds_it() -> None:
    spec = PlacementSpec(devices=8, ray_address="head:6379")
    placement = placed(spec, gpus("a", 2), gpus("b", 2), actors=2, per_actor=4, ranks=8)
    assert [(group.node, len(group.devices)) for group in placement.groups[:2]] == [("", 4), ("", 4)]
    assert [len(allocation.devices) for allocation in placement.allocations[FunctionName.GENERATION]] == [4, 4]
    with pytest.raises(PlacementError, match="tensor_parallel_size is 4, but generation has 4"):
        placed(PlacementSpec(), gpus("a", 2), gpus("b", 2), per_actor=4)  # a private cluster does not grow


def test_the_kind_is_named_where_the_cluster_has_several() -> None:
    nodes = gpus("a", 1), gpus("b", 1, kind="l40s"), cpus(4)
    with pytest.raises(PlacementError, match=r"devices of kinds h100, l40s; name one with placement.kind"):
        placed(PlacementSpec(), *nodes)
    assert placed(PlacementSpec(kind="l40s"), *nodes).groups[0].node == "b"
    assert placed(PlacementSpec(kind="cpu-core"), *nodes).groups[0].kind == "cpu-core"
    with pytest.raises(PlacementError, match=r"placement.kind is 'b200', but the cluster has h100, l40s, cpu-core"):
        placed(PlacementSpec(kind="b200", devices=8), *nodes)


def test_nodes_of_a_kind_may_come_in_a_joined_cluster_for_one_size_or_several() -> None:
    for devices in (8, "auto", {"min": 2, "max": 8}):
        joining = PlacementSpec(kind="h100", devices=devices, ray_address="10.0.0.1:6379")
        assert device_kind(joining, []) == "h100"
    with pytest.raises(PlacementError, match="say how many devices"):
        device_kind(PlacementSpec(kind="h100", ray_address="10.0.0.1:6379"), [])


def test_a_learner_of_another_kind_has_its_devices_beside_those_of_generation() -> None:
    nodes = gpus("a", 3, kind="l40s"), gpus("b", 8), gpus("c", 2), cpus(4)
    spec = PlacementSpec(mode="disaggregated", learner_kind="h100", learner_devices=2)
    placement = placed(spec, *nodes, actors=3, ranks=2)
    assert names(placement, FunctionName.GENERATION) == [["gpu-0"], ["gpu-1"], ["gpu-2"]]
    assert names(placement, FunctionName.LEARNER) == [["gpu-3", "gpu-4"]], "numbered after the others"
    kinds = {group.name: (group.kind, group.node) for group in placement.groups}
    assert kinds["generation-0"] == ("l40s", "a"), "what is not the learner's kind is generation's"
    assert kinds["learner-0"] == ("h100", "c"), "a node that has just enough"
    assert kinds["scoring-0"] == ("cpu-core", "")
    more = placed(spec.model_copy(update={"learner_devices": 9}), *nodes, actors=3, ranks=9)
    assert [(group.node, len(group.devices)) for group in more.groups if group.kind == "h100"] == [("b", 8), ("c", 1)]


def test_cores_of_generation_and_of_scoring_are_not_the_same_beside_a_gpu_that_learns() -> None:
    spec = PlacementSpec(mode="disaggregated", kind="cpu-core", devices=2, learner_kind="h100")
    placement = placed(spec, gpus("a", 1), cpus(4), actors=2)
    assert names(placement, FunctionName.GENERATION) == [["cpu-0"], ["cpu-1"]]
    assert names(placement, FunctionName.SCORING) == [["cpu-2"]]
    assert placement.allocation(FunctionName.LEARNER, 0).devices[0].kind == "h100"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"kind": "l40s", "learner_kind": "b200"},
            r"placement.learner_kind is 'b200', but the cluster has h100, l40s, cpu-core",
        ),
        ({"learner_kind": "h100", "learner_devices": 3}, r"learner_devices asks for 3 device\(s\) of kind h100, but 2"),
        ({"learner_kind": "l40s", "kind": "mi300x"}, "placement.kind is 'mi300x'"),
    ],
)
def test_a_learner_whose_devices_are_not_there_is_refused(values: dict[str, int | str], message: str) -> None:
    spec = PlacementSpec.model_validate({"mode": "disaggregated"} | values)
    with pytest.raises(PlacementError, match=message):
        placed(spec, gpus("a", 1, kind="l40s"), gpus("b", 2), ranks=1)


def test_generation_is_not_put_on_cores_because_the_only_gpus_are_the_learners() -> None:
    with pytest.raises(PlacementError, match="GPUs of the learner's kind only, h100; name generation's with placement"):
        placed(PlacementSpec(mode="disaggregated", learner_kind="h100"), gpus("a", 2), cpus(4))


@pytest.mark.parametrize(
    ("spec", "count", "options", "message"),
    [
        (PlacementSpec(devices=4), 2, {}, r"placement.devices asks for 4 device\(s\) of kind h100, but 2"),
        (PlacementSpec(mode="disaggregated"), 1, {}, "leaves none for generation"),
        (PlacementSpec(), 2, {"per_actor": 4}, "tensor_parallel_size is 4, but generation has 2"),
        (PlacementSpec(), 2, {"ranks": 3}, r"learner.ranks is 3, but the learner has 2 device\(s\)"),
        (PlacementSpec(kind="cpu-core", ray_address="a:1"), 0, {}, "the cluster has no devices of kind cpu-core"),
    ],
)
def test_too_few_devices_are_refused_by_name(
    spec: PlacementSpec, count: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        placed(spec, *([gpus("a", count)] if count else []), **options)


def placed_or_error(
    spec: PlacementSpec, nodes: Sequence[Node], actors: int, per_actor: int
) -> tuple[Placement | None, str]:
    try:
        return placed(spec, *nodes, actors=actors, per_actor=per_actor), ""
    except PlacementError as error:
        return None, str(error)


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    busy=st.integers(0, 9),
    wanted=st.none() | st.integers(1, 20),
    learner=st.integers(1, 6),
    actors=st.integers(1, 12),
    per_actor=st.integers(1, 3),
    disaggregated=st.booleans(),
    gpu=st.booleans(),
    joined=st.booleans(),
)
def test_no_device_is_sold_twice(
    counts: list[int],
    busy: int,
    wanted: int | None,
    learner: int,
    actors: int,
    per_actor: int,
    disaggregated: bool,
    gpu: bool,
    joined: bool,
) -> None:
    nodes = [
        gpus(f"n{i}", count, free=max(count - busy, 0)) if gpu else Node(f"n{i}", "", count, max(count - busy, 0))
        for i, count in enumerate(counts)
    ]
    spec = PlacementSpec(
        mode="disaggregated" if disaggregated else "colocated",
        devices=wanted,
        learner_devices=learner,
        ray_address="a:1" if joined else None,
    )
    count = wanted or sum(counts)
    placement, error = placed_or_error(spec, nodes, actors, per_actor)
    if placement is None:
        most_nodes = len(counts) + count // max(counts)  # those that have to come, too, have devices left over
        reasons = (
            (not joined and count > sum(counts), "placement.devices asks"),
            (disaggregated and learner >= count, "leaves none"),
            (per_actor > 1, "tensor_parallel_size"),
            (gpu and actors * per_actor > count - learner * disaggregated - most_nodes * per_actor, "max_actors"),
        )
        assert any(may and text in error for may, text in reasons), error
        return
    sold: dict[str, float] = defaultdict(float)
    for allocations in placement.allocations.values():
        for allocation in allocations:
            for device, share in allocation.shared:
                sold[device.name] += share
    assert max(sold.values()) <= 1 + 1e-9
    groups = {device.name: group for group in placement.groups for device in group.devices}
    assert len(groups) == sum(len(group.devices) for group in placement.groups)
    assert set(sold) <= set(groups)
    at = dict.fromkeys((node.name for node in nodes), 0)
    for group in placement.groups:
        if group.node:
            at[group.node] += len(group.devices)
    assert all(at[f"n{i}"] <= count for i, count in enumerate(counts))
    for actor in placement.allocations[FunctionName.GENERATION]:
        assert len({groups[device.name].name for device in actor.devices}) == 1
        assert len({device.name for device in actor.devices}) == per_actor


def test_functions_are_those_that_the_spec_needs() -> None:
    needed = {"model": {"path": "m"}, "prompts": {"path": "p"}}
    judge = {"type": "reward_model", "path": "judge"}
    plain = RunSpec.model_validate({**needed, "rewards": [{"type": "exact_match"}]})
    assert [kind.name for kind in kinds_of(plain)] == ["generation", "scoring", "learner"]
    full = RunSpec.model_validate({**needed, "rewards": [judge], "algorithm": {"kl": {"coefficient": 0.1}}})
    together = [name for name in FunctionName if name not in (FunctionName.PREFILL, FunctionName.ENVIRONMENT)]
    assert [kind.name for kind in kinds_of(full)] == [name for name in together if name != FunctionName.CRITIC]
    ppo = RunSpec.model_validate(
        {**needed, "rewards": [judge], "critic": {}, "algorithm": {"type": "ppo", "kl": {"coefficient": 0.1}}}
    )
    assert [kind.name for kind in kinds_of(ppo)] == together
    apart = {"scaling": {"prefill": {"max_actors": 1}}}
    run = RunSpec.model_validate({**needed, "rewards": [{"type": "exact_match"}], **apart})
    assert [kind.name for kind in kinds_of(run)] == ["generation", "prefill", "scoring", "learner"]
    agent = RunSpec.model_validate({**needed, "environment": {"type": "guess:Guess"}})
    assert [kind.name for kind in kinds_of(agent)] == ["generation", "environment", "learner"]


def test_an_engine_of_the_learners_side_stays_on_a_node() -> None:
    judge = ReplicaRequest(
        "judge", Site.LEARNER_SHARED, ranks=4, ranks_key="rewards.0.tensor_parallel_size", one_node=True
    )
    learner = ReplicaRequest(FunctionName.LEARNER, Site.LEARNER, ranks=12)
    for first, second in ((8, 4), (4, 8), (9, 3)):
        found = place(PlacementSpec(), [gpus("a", first), gpus("b", second)], [judge, learner])
        (allocation,) = found.allocations["judge"]
        assert len(found.groups_of(allocation)) == 1
        assert len(allocation.devices) == 4
    with pytest.raises(
        PlacementError, match=r"rewards\.0\.tensor_parallel_size is 4, but no node of the learner has more than 3"
    ):
        place(PlacementSpec(), [gpus("a", 3), gpus("b", 3)], [judge, learner])
