"""A learner whose number of devices, or their kind, changes between two steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fakes.places import SCENARIOS
from fakes.simple_policies import Evenly
from fakes.small_fleet import FOLDER, LEARNER, PRICES, TODAY, actor, batch_of, called, on, setup_of, slot_setup
from fakes.tiny_scenario import scenario
from rlhfless.records import Holding, Work
from rlhfless.scaling.learner_ranks import LEARNER_RANKS, GroupSize
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.prices import DevicePrice, PriceBook
from rlhfless.sim.experiment.figures import unheld_usd
from rlhfless.sim.experiment.run import ExperimentTask, FleetShape, RunResult, fleet_of, layout_of, run, supply_of
from rlhfless.sim.learner_size import LearnerSizes, SimulatedLearnerSize
from rlhfless.sim.scenarios.build import price_book, setup
from rlhfless.sim.scenarios.load import load_scenario
from rlhfless.sim.scenarios.scenario import PolicyEntry, Scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.sim.setup import LearnerShape, Setup
from rlhfless.sim.simulation import Simulation
from rlhfless.spec import WeightedSpec
from rlhfless.spec.errors import InputError

STEPS, START_S, MOVE_S = 5, 0.1, 0.15
TWO, ONE, OTHER = GroupSize(2, "h100"), GroupSize(1, "h100"), GroupSize(2, "b200")
BOTH = PriceBook(
    devices=(
        *PRICES.devices,
        DevicePrice(kind="b200", usd_per_hour=7.2, source="test", as_of=TODAY, rented_by="device"),
    )
)


def shape(devices: int, kind: str = "h100", token_s: float = 0.002, node: int = 0) -> LearnerShape:
    """0.2 s of each step, and `token_s` for each token and device; the first has number 9."""
    held = [Device(f"{kind}-{9 - i}", kind, 9 - i, f"node-{node}") for i in range(devices)]
    where = dataclasses.replace(slot_setup(9, node=node), allocation=Allocation.of(held))
    return dataclasses.replace(on(LEARNER, where), learn_token_s=token_s / devices)


def change_s(before: GroupSize, after: GroupSize) -> float:
    return START_S if before.kind == after.kind else MOVE_S


def simulated(time_weight: float, prices: PriceBook = PRICES, off: int = 0) -> Simulation:
    sizes = LearnerSizes({TWO: shape(2), ONE: shape(1)}, change_s, {"h100": 1.0})
    return run_of(sizes, setup_of(actor(0), learner=shape(2), max_staleness=off), time_weight, prices)


def run_of(sizes: LearnerSizes, made: Setup, time_weight: float, prices: PriceBook) -> Simulation:
    terms = RunContract(WeightedSpec(time_weight=time_weight), STEPS)
    simulation = Simulation(made, Evenly(), prices, SimulatedLearnerSize(sizes, made, terms, prices))
    for step in range(1, STEPS + 1):
        simulation.step(dataclasses.replace(batch_of([(5, [100])]), step=step))
    simulation.close()
    return simulation


def changes(simulation: Simulation) -> list[tuple[int, str, object]]:
    found = [each for each in simulation.ledger.decisions if each.kind == LEARNER_RANKS]
    return [(each.step, each.choice, each.inputs["before"]) for each in found]


def learned_s(simulation: Simulation) -> list[float]:
    return [call.end_s - call.start_s for call in called(simulation, Work.LEARN)]


def held_s(simulation: Simulation, device: str) -> tuple[float, float]:
    of: list[Holding] = [holding for holding in simulation.ledger.holdings if holding.device == device]
    return min(holding.start_s for holding in of), max(holding.end_s for holding in of)


def test_cost_takes_a_device_back_after_the_first_step_that_was_measured() -> None:
    simulation = simulated(time_weight=0)
    assert changes(simulation) == [(2, "1 x h100", "2 x h100")]
    assert learned_s(simulation) == pytest.approx([0.2 + 0.105] * 2 + [0.2 + 0.21] * 3)
    steps = simulation.ledger.steps
    assert steps[1].start_s == steps[0].end_s
    assert steps[2].start_s == pytest.approx(steps[1].end_s + START_S), "the weights are those of the new group"
    assert held_s(simulation, "h100-8")[1] == pytest.approx(steps[1].end_s)
    assert held_s(simulation, "h100-9")[1] >= steps[4].end_s


def test_time_keeps_all() -> None:
    assert changes(simulated(time_weight=1)) == []


def test_nothing_is_saved_where_a_device_costs_as_much_after_its_release() -> None:
    whole_nodes = [device.model_copy(update={"rented_by": "node"}) for device in PRICES.devices]
    assert changes(simulated(0, PriceBook(devices=tuple(whole_nodes)))) == []


def test_the_next_step_is_drawn_during_a_change_where_steps_overlap() -> None:
    simulation = simulated(time_weight=0, off=1)
    assert changes(simulation) == [(2, "1 x h100", "2 x h100")]
    assert len(simulation.ledger.steps) == STEPS
    assert sum(learned_s(simulation)[2:]) == pytest.approx(3 * 0.41)


def moving(token_s: float, node: int) -> tuple[LearnerSizes, dict[GroupSize, LearnerShape]]:
    """Two H100 of 2 ms a token and rank, and two B200, which should be twice as fast by their data sheet."""
    shapes = {TWO: shape(2), OTHER: shape(2, "b200", token_s, node)}
    return LearnerSizes(shapes, change_s, {"h100": 1.0, "b200": 2.0}), shapes


def test_time_moves_the_learner_to_a_faster_kind() -> None:
    """Actor 0 is on the learner's node at first, actor 5 on the one that it moves to; a node pulls in half a second."""
    sizes, shapes = moving(token_s=0.001, node=5)
    transport = dataclasses.replace(FOLDER, home="node-0", pull_bytes_per_s=4e8)
    simulation = run_of(sizes, setup_of(actor(0), actor(5), learner=shapes[TWO], transport=transport), 1, BOTH)
    assert changes(simulation) == [(2, "2 x b200", "2 x h100")]
    assert learned_s(simulation) == pytest.approx([0.2 + 0.105] * 2 + [0.2 + 0.0525] * 3)
    (decision,) = (each for each in simulation.ledger.decisions if each.kind == LEARNER_RANKS)
    assert decision.inputs["changed_in_s"] == MOVE_S
    steps = simulation.ledger.steps
    assert steps[2].start_s == pytest.approx(steps[1].end_s + MOVE_S)
    for index in (8, 9):
        assert held_s(simulation, f"h100-{index}")[1] == pytest.approx(steps[1].end_s)
        assert held_s(simulation, f"b200-{index}") == pytest.approx((steps[1].end_s, steps[4].end_s))
    loads = called(simulation, Work.LOAD_WEIGHTS)
    for name, expected_s in (("generation-0", [0.3] * 2 + [0.8] * 3), ("generation-1", [0.8] * 2 + [0.3] * 3)):
        assert [call.duration_s for call in loads if call.replica == name] == pytest.approx(expected_s), name
    assert simulation.fleet.setup.transport.home == "node-5"


def test_a_kind_that_turns_out_slower_than_its_data_sheet_is_left_for_good() -> None:
    """A node that no actor is on takes 5 s at first. Of 0.41 s there 0.305 would be left, and a move costs 0.15 s for
    two steps."""
    sizes, shapes = moving(token_s=0.004, node=7)
    simulation = run_of(sizes, setup_of(actor(0), learner=shapes[TWO]), 1, BOTH)
    assert changes(simulation) == [(2, "2 x b200", "2 x h100"), (3, "2 x h100", "2 x b200")]
    assert learned_s(simulation) == pytest.approx([0.305, 0.305, 0.41, 0.305, 0.305])
    steps = simulation.ledger.steps
    assert steps[2].start_s == pytest.approx(steps[1].end_s + 5.0 + MOVE_S)
    assert steps[3].start_s == pytest.approx(steps[2].end_s + MOVE_S)


def test_weights_leave_their_new_node_when_the_learner_is_there() -> None:
    """The step that is drawn meanwhile goes on, and the next one loads what the new node gives."""
    shapes = {TWO: shape(2, token_s=0.1), OTHER: shape(2, "b200", 0.05, node=7)}
    transport = dataclasses.replace(FOLDER, home="node-0", pull_bytes_per_s=4e8)
    made = setup_of(actor(0), learner=shapes[TWO], transport=transport, max_staleness=1)
    simulation = run_of(LearnerSizes(shapes, change_s, {"h100": 1.0, "b200": 2.0}), made, 1, BOTH)
    assert changes(simulation) == [(2, "2 x b200", "2 x h100")]
    moved_s = simulation.ledger.steps[1].end_s
    later = [call.end_s for call in called(simulation, Work.LOAD_WEIGHTS) if call.start_s >= moved_s]
    assert later[0] == pytest.approx(moved_s + 5.0 + MOVE_S + 0.8)


def test_a_scenario_says_how_few() -> None:
    loaded = load_scenario(SCENARIOS / "gsm8k-3b-h100.yaml")
    elastic = loaded.model_copy(
        update={"learner": loaded.learner.model_copy(update={"min_devices": 2}), "reference": None}
    )
    apart = FleetShape(ScenarioPlacementSpec(mode="disaggregated", learner_devices=4))
    assert layout_of(loaded, apart).learner_sizes() is None
    sizes = layout_of(elastic, apart).learner_sizes()
    assert sizes is not None
    shapes = {size.ranks: shape for size, shape in sizes.shapes.items()}
    assert {count: len(of.slot_setup.allocation.devices) for count, of in shapes.items()} == {4: 4, 3: 3, 2: 2}
    assert next(iter(shapes)) == 4, "it begins with all"
    assert shapes[2].learn_token_s == pytest.approx(2 * shapes[4].learn_token_s)
    whole, part = layout_of(elastic, apart).learner().slot_setup, shapes[2].slot_setup
    assert whole.start_s == part.start_s
    # Four devices give their parts of the state to the host's memory, and two take them.
    assert part.wake_s == pytest.approx(2 * whole.sleep_s)
    assert sizes.change_s(GroupSize(4, "h100"), GroupSize(2, "h100")) == whole.sleep_s + part.start_s + part.wake_s
    with pytest.raises(InputError, match="the learner shares its devices"):
        layout_of(elastic, FleetShape(ScenarioPlacementSpec(mode="colocated"))).learner_sizes()


def two_kinds(elsewhere: dict[str, int], rented_by: str = "device", **values: Any) -> Scenario:
    """A node of four L40S, of which the learner has two, and one of three H100."""
    kinds = {"l40s": 4, "h100": 3}
    machines = [{"kind": kind, "devices_per_node": count, "rented_by": rented_by} for kind, count in kinds.items()]
    placement = {"mode": "disaggregated", "learner_devices": 2, "learner_elsewhere": elsewhere}
    contract = {"type": "weighted", "time_weight": 1}
    return scenario(cluster={"machines": machines}, placement=placement, contract=contract, **values)


def test_a_scenario_says_where_else() -> None:
    made = two_kinds({"h100": 2})
    layout = layout_of(made, FleetShape(made.placement))
    names = [device.name for shape in layout.actors() for device in shape.slot_setup.allocation.devices]
    assert names == ["l40s-0", "l40s-1", "h100-0"], "the last two are the learner's"
    sizes = layout.learner_sizes()
    assert sizes is not None
    own, other = GroupSize(2, "l40s"), GroupSize(2, "h100")
    assert list(sizes.shapes) == [own, other]
    old, new = (sizes.shapes[size].slot_setup for size in (own, other))
    assert [device.name for device in new.allocation.devices] == ["h100-1", "h100-2"]
    l40s, h100 = (made.cluster.sheet(kind) for kind in ("l40s", "h100"))
    faster = h100.flops_per_s.value / l40s.flops_per_s.value
    assert sizes.shapes[own].learn_token_s == pytest.approx(faster * sizes.shapes[other].learn_token_s)
    # 16 bytes a parameter: over the links of two L40S, the network's 12.5 GB/s, and the links of two H100.
    state = 16 * made.model.shape.parameters
    links_s = state / (2 * l40s.host_bytes_per_s.value) + state / (2 * h100.host_bytes_per_s.value)
    assert sizes.change_s(own, other) == pytest.approx(old.start_s + links_s + state / 12.5e9)
    assert sizes.change_s(own, own) == pytest.approx(old.start_s + state / l40s.host_bytes_per_s.value)
    begun = setup(made, layout, 0)
    moved = begun.with_learner(sizes.shapes[other])
    nodes = ("l40s-node-0", "h100-node-0")
    assert [begun.transport.pulls(node) for node in nodes] == [False, True]
    assert [moved.transport.pulls(node) for node in nodes] == [True, False]


def moved(made: Scenario) -> RunResult:
    entry = PolicyEntry(name="cost_aware")
    return run(ExperimentTask(made, entry, fleet_of(made, entry), (WeightedSpec(time_weight=1.0),), 0, traced=True))


def test_a_scenario_whose_learner_moves() -> None:
    # A model of which a move takes less than it saves.
    result = moved(two_kinds({"h100": 2}, learner={"mfu": 1e-5}, steps=40))
    trace = result.trace
    assert trace is not None
    assert [each.choice for each in trace.decisions if each.kind == LEARNER_RANKS] == ["2 x h100"]
    of_learner = {each.device for each in trace.holdings if each.function == "learner"}
    assert of_learner == {"l40s-2", "l40s-3", "h100-1", "h100-2"}
    assert of_learner.isdisjoint(each.device for each in trace.holdings if each.function == "generation")
    assert str(result.fleet) == "all devices, 2 of them the learner's, which may move to 2 x h100"


@pytest.mark.parametrize(("rented_by", "paid"), [("device", 0), ("node", 3)])
def test_what_is_set_aside_is_paid_for_as_the_book_has_it(rented_by: str, paid: int) -> None:
    made = two_kinds({"h100": 2}, rented_by)
    supply = supply_of(made, layout_of(made, FleetShape(made.placement)), reserved=False)
    assert supply.count == {"l40s": 4, "h100": 3}
    prices = price_book(made)
    others = 4 * prices.device("l40s").usd_per_hour if rented_by == "node" else 0.0
    assert unheld_usd([], 3600.0, prices, supply) == pytest.approx(paid * prices.device("h100").usd_per_hour + others)


def test_fleets_without_the_kind_or_co_located_do_not_move() -> None:
    made = two_kinds({"h100": 2})
    assert layout_of(made, FleetShape(made.placement, kinds=("l40s",))).learner_sizes() is None
    colocated = fleet_of(made, PolicyEntry(name="static_colocated"))
    assert colocated.placement.learner_elsewhere == {}
    assert len(layout_of(made, colocated).actors()) == 7
    assert len({FleetShape(made.placement), FleetShape(two_kinds({"h100": 2}).placement), colocated}) == 2


def test_all_devices_of_a_kind_may_be_the_learners() -> None:
    """Also of one on which no actor fits."""
    made = two_kinds({"h100": 3})
    layout = layout_of(made, FleetShape(made.placement))
    assert {shape.slot_setup.allocation.devices[0].kind for shape in layout.actors()} == {"l40s"}


@pytest.mark.parametrize(
    ("elsewhere", "values", "told"),
    [
        (
            {"h10": 1},
            {},
            r"learner_elsewhere.h10: 1 x h10, but cluster.machines has l40s, h100\n    did you mean `h100`",
        ),
        ({"l40s": 1}, {}, r"learner_elsewhere.l40s: 1 x l40s, which is the learner's own kind\n    .*min_devices"),
        ({"h100": 4}, {}, r"learner_elsewhere.h100: 4 x h100, but cluster.machines has 3 of them\n    take fewer, or"),
        (
            {"h100": 1},
            {"learner": {"state_bytes_per_parameter": 2000}},
            r"learner_elsewhere.h100: the learner has 1 x h100 there, and its state needs 2\n    give it more devices",
        ),
        (
            {"h100": 1},
            {"transport": {"kind": "nccl"}},
            r"transport.kind: nccl goes between .* \{'h100': 1\}\n    take `au",
        ),
    ],
)
def test_a_place_that_the_learner_cannot_have_is_refused(
    elsewhere: dict[str, int], values: dict[str, Any], told: str
) -> None:
    made = two_kinds(elsewhere, **values)
    with pytest.raises(InputError, match=told):
        layout_of(made, FleetShape(made.placement))
