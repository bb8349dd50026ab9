"""An engine model fitted by replaying the engine, where requests wait or are preempted. Pure.

`LatencyFit` reads iterations off the requests' own starts and ends, which needs that a request draws one token in each
iteration from its start to its end. With few KV blocks that is not so: requests wait in the queue, or lose their blocks
and are computed again. Here the engine itself is replayed in closed form (`sim.engine`), with the KV blocks that it
had, and the coefficients of a `LinearEngine` are searched for which every request ends when it did.

The search is a pattern search over the logarithms of the coefficients: each is tried larger and smaller by a factor,
which is reduced when no trial helps. It needs no gradient, of which preemptions leave none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.sim.engine import EnginePool, EngineShape, PricedModel
from rlhfless.sim.samples import RolloutBatch, StepProgress

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FIRST_FACTOR, LAST_FACTOR = 2.0, 1.005
"""Factors by which a coefficient is changed: at first, and when the search ends."""

LEAST = 1e-12
"""Stands for a coefficient of 0, whose logarithm does not exist."""


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that one engine has served; each [requests], ascending by `asked_s`."""

    prompt_tokens: Ints
    response_tokens: Ints
    asked_s: Floats
    """When each was given to the engine, where it may have waited."""
    finished_s: Floats

    @property
    def batch(self) -> RolloutBatch:
        """The same as one step; no request shares its prompt with another."""
        count = len(self.asked_s)
        names = tuple(map(str, range(count)))
        return RolloutBatch(1, names, self.prompt_tokens, np.arange(count), self.response_tokens)


def replayed_s(engine: LinearEngine, shape: EngineShape, served: Served) -> Floats:
    """[requests]: when each ends, by this model.

    Raises ValueError for a request that does not fit into the KV blocks, even alone.
    """
    progress = StepProgress(served.batch)
    pool = EnginePool(shape, PricedModel(engine, shape.max_sequences), progress.table, [0])
    pool.open(0, progress, float(served.asked_s[0])).submit(np.arange(len(served.asked_s)), served.asked_s)
    pool.advance(math.inf)
    return np.asarray(progress.table.finish_s, np.float64)


def fit_by_replay(
    served: Served, shape: EngineShape, start: LinearEngine, judged: npt.NDArray[np.bool_]
) -> LinearEngine:
    """The coefficients with the least mean error of the judged requests' times, as shares of these, from `start` on.
    Raises ValueError as `replayed_s`, and if no request is judged."""
    if not judged.any():
        raise ValueError("no request is judged; choose at least one to fit to")
    real_s = (served.finished_s - served.asked_s)[judged]
    names = [field.name for field in fields(LinearEngine)]

    def off(logs: Floats) -> float:
        engine = LinearEngine(*np.exp(logs).tolist())
        took_s = (replayed_s(engine, shape, served) - served.asked_s)[judged]
        return float(np.abs(np.log(took_s / real_s)).mean())

    best = np.log([max(getattr(start, name), LEAST) for name in names])
    least, step = off(best), math.log(FIRST_FACTOR)
    while step > math.log(LAST_FACTOR):
        better = False
        for index in range(len(names)):
            for sign in (1.0, -1.0):
                other = best.copy()
                other[index] += sign * step
                error = off(other)
                if error < least:
                    best, least, better = other, error, True
                    break
        step = step if better else step / 2
    return LinearEngine(*np.exp(best).tolist())
