"""Devices by the second: what a run costs at a seller of containers, by the same run on rented nodes, simulated.

    python benchmarks/by_the_second.py [--restores 5 14 45] [--markdown docs/simulate.md] [--smoke] [SCENARIO ...]

The node is `static_colocated` on all devices of the scenario, paid for all the time. Of the seller's containers the
learner has as many as the node, or twice as many; so have the actors, or as many as `cost_aware` wants: the machines
have no count. The learner is paid for its work of a step, its restore, and its state from and to a store
(`cluster.serverless`), and costs time where these do not fit into generation. Of these fleets and several weights of
time the cheapest run that is not slower than the node is taken, at the price of the node: its cost by the node's,
inverted, is the premium below which the seller is cheaper.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from smoke import parsed
from where import machine

from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.experiment.figures import Totals
from rlhfless.sim.scenarios import Scenario, load_scenario
from rlhfless.sim.scenarios.cluster import ServerlessSpec, uncounted_nodes
from rlhfless.sim.scenarios.scenario import PolicyEntry, WeightedContract
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec

FOLDER = Path(__file__).parents[1] / "examples" / "scenarios"
NAMES = (
    "code-7b-l40s",
    "code-32b-h100",
    "gsm8k-7b-a100",
    "reasoning-7b-a100",
    "reasoning-7b-h100",
    "reasoning-32b-h100",
    "paper-3b-l40s",
    "few-shot-7b-h100",
)

WEIGHTS = (1.0, 0.7, 0.4, 0.15)
"""Of time, in the contract."""

SIZES = (1, 2)
"""Devices of the learner, and of counted actors, by those of the node."""

AS_FAST = 1.01
"""Times the node's time."""

STEPS = 10
BEGIN, END = "<!-- release: begin -->", "<!-- release: end -->"


@dataclass(frozen=True)
class Priced:
    """Time and cost by those of the node."""

    time: float
    cost: float


def node(scenario: Scenario) -> Totals:
    """Later epochs of the static run on rented nodes."""
    entry = PolicyEntry(name="static_colocated")
    return _totals(scenario.model_copy(update={"policies": (entry,)}), entry)


def containers(scenario: Scenario, restore_s: float) -> Iterator[Totals]:
    """Runs of all sizes and weights."""
    (machines, *_) = scenario.cluster.machines
    seller = ServerlessSpec(restore_s=restore_s)
    actor_devices = scenario.engine.tensor_parallel * scenario.engine.data_parallel
    for times in SIZES:
        learner = times * machines.devices
        uncounted = uncounted_nodes(machines.devices_per_node, scenario.prompts_per_step, actor_devices, learner)
        placed = ScenarioPlacementSpec(mode="disaggregated", learner_devices=learner)
        for nodes in (2 * times * machines.nodes, uncounted):
            changes = {"nodes": nodes, "rented_by": None, "tenure": "rented"}
            cluster = scenario.cluster.model_copy(
                update={"machines": (machines.model_copy(update=changes),), "serverless": seller, "billing": None}
            )
            for weight in WEIGHTS:
                contract = WeightedContract(time_weight=weight)
                entry = PolicyEntry(name="cost_aware", label=f"{weight}", placement=placed, contract=contract)
                yield _totals(scenario.model_copy(update={"cluster": cluster, "policies": (entry,)}), entry)


def _totals(scenario: Scenario, entry: PolicyEntry) -> Totals:
    result = compare(scenario, [entry.shown])
    steps = result.results[entry.shown][0].steps
    return Totals.of(steps[scenario.epoch_steps :] or steps[1:])


def best(of_node: Totals, tried: Sequence[Totals]) -> Priced:
    """The cheapest that is as fast; else the fastest."""
    ratios = [Priced(each.time_s / of_node.time_s, each.usd / of_node.usd) for each in tried]
    fast = [each for each in ratios if each.time <= AS_FAST]
    return min(fast, key=lambda each: each.cost) if fast else min(ratios, key=lambda each: each.time)


def lines(table: dict[str, dict[float, Priced]], restores: Sequence[float]) -> Iterator[str]:
    yield "| scenario | " + " | ".join(f"{restore:g} s: cost at time | premium below" for restore in restores) + " |"
    yield "| --- |" + " --- | --- |" * len(restores)
    for name, row in table.items():
        cells = [f"{row[r].cost:.2f} at {row[r].time:.2f}x | {1 / row[r].cost:.2f}" for r in restores]
        yield f"| {name} | " + " | ".join(cells) + " |"
    cells = [f"{median(row[r].cost for row in table.values()):.2f} | " for r in restores]
    yield "| median | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(NAMES))
    parser.add_argument("--restores", type=float, nargs="+", default=[5.0, 14.0, 45.0])
    parser.add_argument("--markdown", type=Path)
    arguments = parsed(parser, restores=[14.0], scenarios=["gsm8k-7b-a100"])
    table = {}
    for name in arguments.scenarios:
        begin_s = time.monotonic()
        whole = load_scenario(FOLDER / f"{name}.yaml")
        scenario = whole.model_copy(update={"seeds": 1, "steps": min(whole.steps, whole.epoch_steps + STEPS)})
        of_node = node(scenario)
        table[name] = {r: best(of_node, list(containers(scenario, r))) for r in arguments.restores}
        print(f"{name}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
    text = "\n".join(lines(table, arguments.restores))
    print(machine(), text, sep="\n")
    if arguments.markdown is not None:
        page = arguments.markdown.read_text("utf-8")
        before, _, rest = page.partition(BEGIN)
        arguments.markdown.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
