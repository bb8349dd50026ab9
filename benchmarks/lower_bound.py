"""How near the lower bound of a step is to the optimum, on steps so small that every schedule can be tried.

    python benchmarks/lower_bound.py [--cases 200] [--smoke]

A step of a few short responses on one to three actors. The optimum is the best of all assignments of samples to actors
and, on each actor, of all ways to run its samples together or one after the other (a dynamic programme over the tokens
that are left; samples do not move between actors). It is beside nothing but generation: weights are loaded and the
learner has no work. Printed is optimum / bound of the time, of the cost at any time, and of the cost within 1.2 times
the least time; a bound above an optimum would be wrong, and ends the benchmark with 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import dataclass
from functools import cache

import numpy as np
from smoke import parsed
from step_bound import ActorKind, BoundWork, alone_s, least_drawing_s, least_usd
from where import machine

from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.samples import RolloutBatch

ROUNDING = 1e-9
SLACK = 1.2
"""Time that the third cost may take, by the least."""


@dataclass(frozen=True)
class Case:
    """A step, and the fleet that draws it."""

    model: LinearEngine
    actors: int
    max_sequences: int
    kv_tokens: int
    up_s: float
    prompt_tokens: tuple[int, ...]  # [samples], each a prompt of its own
    response_tokens: tuple[int, ...]  # [samples]

    @classmethod
    def random(cls, random: np.random.Generator) -> Case:
        samples = int(random.integers(2, 6))
        prompts = tuple(random.integers(1, 9, samples).tolist())
        responses = tuple(random.integers(2, 8, samples).tolist())
        model = LinearEngine(*(10.0 ** random.uniform((-2, -4, -5, -5, -8), (-1, -1.5, -2, -3, -7))).tolist())
        longest = max(map(sum, zip(prompts, responses, strict=True)))
        kv_tokens = int(random.integers(longest, 3 * longest))
        up_s = float(random.choice([0.0, 0.05]))
        return cls(model, int(random.integers(1, 4)), int(random.integers(1, 5)), kv_tokens, up_s, prompts, responses)

    @property
    def work(self) -> BoundWork:
        """The step as the bound sees it."""
        samples = len(self.prompt_tokens)
        batch = RolloutBatch(
            1,
            tuple(map(str, range(samples))),
            np.array(self.prompt_tokens),
            np.arange(samples),
            np.array(self.response_tokens),
        )
        return BoundWork.of(batch, block_tokens=1)

    @property
    def kind(self) -> ActorKind:
        """The fleet as the bound sees it; an actor costs a dollar a second."""
        prices = PricedModel(self.model, self.max_sequences)
        shape = EngineShape(self.max_sequences, self.kv_tokens, 1, None)
        return ActorKind.of_engine(shape, prices, self.actors, 1.0, self.up_s)


def optimum(case: Case) -> tuple[float, float, float]:
    """The least time, the least cost, and the least cost within `SLACK` times the least time."""
    seconds = {}
    samples = range(len(case.prompt_tokens))
    for size in range(1, len(samples) + 1):
        for chosen in itertools.combinations(samples, size):
            seconds[chosen] = _alone(case, chosen)
    found = []
    for owner in itertools.product(range(case.actors), repeat=len(samples)):
        parts = [tuple(i for i in samples if owner[i] == actor) for actor in range(case.actors)]
        ends_s = [case.up_s + seconds[part] for part in parts if part]
        found.append((max(ends_s), sum(ends_s)))
    least_s = min(time_s for time_s, _ in found)
    least = min(usd for _, usd in found)
    return least_s, least, min(usd for time_s, usd in found if time_s <= SLACK * least_s)


def _alone(case: Case, chosen: tuple[int, ...]) -> float:
    """Least seconds in which one actor draws these samples."""
    model = case.model
    prefill_s = sum(model.prefill_s(case.prompt_tokens[i]) for i in chosen)

    @cache
    def rest_s(drawn: tuple[int, ...]) -> float:
        open_ = [k for k, i in enumerate(chosen) if drawn[k] < case.response_tokens[i]]
        best_s = 0.0 if not open_ else math.inf
        for size in range(1, min(len(open_), case.max_sequences) + 1):
            for batch in itertools.combinations(open_, size):
                context = sum(case.prompt_tokens[chosen[k]] + drawn[k] for k in batch)
                if context > case.kv_tokens:
                    continue
                after = tuple(count + (k in batch) for k, count in enumerate(drawn))
                spent_s = model.iteration_s(size) + model.context_s * context
                best_s = min(best_s, spent_s + rest_s(after))
        return best_s

    return prefill_s + rest_s((1,) * len(chosen))


def bounds(case: Case, least_s: float) -> tuple[float, float, float]:
    """The bounds of the three, the last within `SLACK` times `least_s`."""
    kind, work = case.kind, case.work
    time_s = case.up_s + max(float(alone_s([kind], work).max()), least_drawing_s(kind, work))
    limits = np.array([math.inf, SLACK * least_s - case.up_s])
    any_usd, within_usd = least_usd(kind, work, limits).tolist()
    return time_s, any_usd, within_usd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    arguments = parsed(parser, cases=5)
    ratios = []
    for seed in range(arguments.cases):
        case = Case.random(np.random.default_rng(seed))
        best = optimum(case)
        ratios.append([each / bound for each, bound in zip(best, bounds(case, best[0]), strict=True)])
    print(machine())
    print(f"{'optimum / bound':34} {'least':>7} {'median':>7} {'most':>7}")
    names = ("time", "cost, at any time", f"cost, in {SLACK:g} x the least time")
    for name, column in zip(names, zip(*ratios, strict=True), strict=True):
        print(f"{name:34} {min(column):7.3f} {float(np.median(column)):7.3f} {max(column):7.3f}")
    if min(min(each) for each in ratios) < 1 - ROUNDING:
        sys.exit("an optimum is below its bound, so the bound is wrong")


if __name__ == "__main__":
    main()
