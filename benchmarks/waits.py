"""What waits for environments cost: generation device-seconds per token at waits of 0 to 100 s per call, simulated.

    python benchmarks/waits.py [--smoke] [--waits 0 1 10 100] [--steps 3] [--write]

Episodes have turns as reported of 610 coding sessions (median 29, p90 56, p99 85), of about 120 tokens each. Four H100
generate them for Qwen2.5-7B; the learner has devices of its own. `kept` is a static fleet whose episodes keep their
actors while they wait, `parked` is `cost_aware` with `environment.park_s` at its default. `--write` writes the table
into docs/environments.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from smoke import parsed
from where import machine

from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policy import Policy
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.policies import configured, make_policy
from rlhfless.sim.run import simulate
from rlhfless.sim.samples import EpisodeTurns, RolloutBatch
from rlhfless.sim.scenarios import build, load_scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.sim.setup import ServiceShape, Setup, SlotSetup
from rlhfless.spec import EnvironmentSpec, WeightedSpec

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "environments.md"
BEGIN, END = "<!-- begin: benchmarks/waits.py -->", "<!-- end: benchmarks/waits.py -->"
TURNS, TURNS_SPREAD, FEWEST, MOST = 29, 0.51, 5, 99
TURN_TOKENS, GIVEN_TOKENS, SPREAD = 120, 30, 0.5
PROMPT_TOKENS = 400
SIBLINGS = 8


def batch(step: int, prompts: int, wait_s: float) -> RolloutBatch:
    """Return the episodes of a step; only their waits depend on `wait_s`."""
    random, samples = np.random.default_rng(step), prompts * SIBLINGS
    count = np.clip(np.rint(random.lognormal(math.log(TURNS), TURNS_SPREAD, samples)), FEWEST, MOST).astype(np.int64)
    turns, last = int(count.sum()), np.cumsum(count) - 1
    own = np.ceil(random.lognormal(math.log(TURN_TOKENS), SPREAD, turns)).astype(np.int64)
    given = np.ceil(random.lognormal(math.log(GIVEN_TOKENS), SPREAD, turns)).astype(np.int64)
    waits = wait_s * random.lognormal(-(SPREAD**2) / 2, SPREAD, turns)  # of mean 1
    given[last] = 0
    total = np.cumsum(own + given)
    before = np.repeat(np.append(0, total[last][:-1]), count)
    end = total - before - given
    nothing = np.zeros(samples, np.int64)
    return RolloutBatch(
        step,
        tuple(f"p{number}" for number in range(prompts)),
        np.full(prompts, PROMPT_TOKENS),
        np.repeat(np.arange(prompts), SIBLINGS),
        (end + given)[last],
        turns=EpisodeTurns(count, nothing, end, given, waits, np.zeros(samples)),
    )


def fleet(park_s: float, most_tokens: int) -> tuple[Setup, PriceBook]:
    """Return a fleet under way, whose environment has CPU cores."""
    scenario = load_scenario(ROOT / "examples" / "scenarios" / "gsm8k-7b-h100-owned.yaml")
    scenario = scenario.model_copy(update={"max_tokens": most_tokens})
    layout = build.ScenarioLayout(scenario, ScenarioPlacementSpec(mode="disaggregated"))
    setup = build.setup(scenario, layout, seed=0)
    cores = Allocation.of((Device("cpu-core-0", "cpu-core", 0),))
    answers = ServiceShape(SlotSetup(cores, "node-0", 1.0, beside=True), FunctionName.ENVIRONMENT, None, 0.0, 0.0)
    actors = tuple(replace(actor, engine=replace(actor.engine, park_s=park_s)) for actor in setup.actors)
    return replace(setup, actors=actors, services=(answers,), warm=True), build.price_book(scenario)


@dataclass(frozen=True)
class Figures:
    """Of a run after its first step. Cost and starts are those of a step."""

    step_s: float
    held_device_s: float
    tokens: int
    usd: float
    starts: float

    @property
    def per_token_ms(self) -> float:
        """Milliseconds for which a device was held, per generated token."""
        return 1000 * self.held_device_s / self.tokens


def figures(batches: Sequence[RolloutBatch], policy: Policy, park_s: float) -> Figures:
    """Simulate a run."""
    most = max(int(each.response_tokens.max()) for each in batches)
    setup, prices = fleet(park_s, most)
    trace = simulate(setup, policy, prices, batches)
    from_s, to_s = trace.steps[0].end_s, trace.steps[-1].end_s  # in the first step, waits are not known
    rows = [replace(row, start_s=max(row.start_s, from_s), end_s=min(row.end_s, to_s)) for row in trace.holdings]
    rows = [row for row in rows if row.end_s > row.start_s]
    held = [row for row in rows if row.function == FunctionName.GENERATION]
    calls = [call for call in trace.invocations if call.work is Work.GENERATE and call.step > batches[0].step]
    later = len(batches) - 1
    return Figures(
        (to_s - from_s) / later,
        sum(row.device_s for row in held),
        sum(call.output_tokens for call in calls),
        prices.cost_usd(rows) / later,
        sum(row.state is ReplicaState.STARTING for row in held) / later,
    )


def policies() -> dict[str, tuple[Policy, float]]:
    contract = RunContract(WeightedSpec(time_weight=0.5))
    parks_s = EnvironmentSpec(type="a:B").park_s
    return {
        "kept": (make_policy("static"), math.inf),
        "parked": (make_policy("cost_aware", configured("cost_aware", {}), contract), parks_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waits", type=float, nargs="+", default=[0.0, 1.0, 10.0, 100.0], help="mean seconds per call")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="per step, with 8 samples each")
    parser.add_argument("--write", action="store_true", help="write the table into docs/environments.md")
    arguments = parsed(parser, waits=[0.0, 10.0], steps=2, prompts=1)
    rows = [
        "| wait per call | fleet | seconds per step | device-ms per token | against no wait | step costs | starts |",
        "|---|---|---|---|---|---|---|",
    ]
    print(machine(), *rows, sep="\n")
    first: dict[str, Figures] = {}
    for wait_s in arguments.waits:
        batches = [batch(step, arguments.prompts, wait_s) for step in range(1, arguments.steps + 1)]
        for name, (policy, park_s) in policies().items():
            found = figures(batches, policy, park_s)
            base = first.setdefault(name, found)
            more = found.per_token_ms / base.per_token_ms - 1
            rows.append(
                f"| {wait_s:g} s | {name} | {found.step_s:.0f} | {found.per_token_ms:.2f} | {more:+.0%} | "
                f"${found.usd:.2f} | {found.starts:.0f} |"
            )
            print(rows[-1], flush=True)
    if arguments.write:
        text = PAGE.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(rows) + f"\n\n{END}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
