"""An engine model fitted to the run's own ledger while it runs: non-negative least squares, with forgetting. Pure.

    seconds of a span = c0 iterations + c1 sequences + g context + p prefill + q prefill x its context

(`timeline` has the sums). A row is divided by its seconds, so that relative errors count. Only the sums of products are
kept, however long the run. A prior, such as a roofline, is used before there is data, and later decides terms that the
data cannot tell apart: each coefficient is pulled towards its prior, relative to it. Then c1 may differ between small
and large batches, each pulled towards the c1 of the line: batch sizes that were not seen stay on the line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rlhfless.records import Invocation, Work
from rlhfless.records.traces import TracedRollout
from rlhfless.scaling.accounting import union
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.timeline import KNOTS, WORK, Array, BoolArray, Requests, spans

KEPT = 0.8
"""Weight of all earlier steps at each new one: an engine's speed changes with its neighbours, seldom more."""

PRIOR_WEIGHT = 0.1
"""The prior weighs as much as a tenth of one row whose term is all of its time: it decides only what rows cannot."""

LEAST = 0.01
"""An iteration takes at least this share of the prior's time for one sequence, whatever the rows say: in a step whose
batches are full all the time, prefills may explain all of its time, and no plan can be made with free iterations."""

SLOWEST_TO_FASTEST = 20
"""A token takes at most this many times less than the median's. The order of requests that waited is a guess; where it
is wrong, a request seems to begin just before it ends, and its row would outweigh all others."""

# Batches and prefills at which a prior model is evaluated, to fit a line to it.
_FEW, _MANY = 1, 128
_CHUNK, _BEHIND = 2048, 8192

# [WORK, LINE]: a line has one coefficient for the sequences of all batches.
_LINE = np.zeros((len(WORK), len(WORK) - len(KNOTS) + 1))
_LINE[0, 0] = 1
_LINE[1 : len(KNOTS) + 1, 1] = 1
_LINE[len(KNOTS) + 1 :, 2:] = np.eye(3)

# The unit of a term that is free in the prior: as much as the fixed part, in a batch of 128 contexts of 1,024.
_FREE = np.array([1, 1 / _MANY, 1 / (_MANY * 1024), 1 / _MANY, 1 / (_MANY * 1024)])


@dataclass(frozen=True, slots=True)
class LinearEngine:
    """An `EngineModel` of five coefficients, for an engine that has not run yet."""

    fixed_s: float
    """Seconds of each decode iteration."""
    sequence_s: float
    """Seconds of each sequence in it."""
    context_s: float
    prefill_token_s: float
    prefill_context_s: float
    """Seconds of each pair of a prefilled token and a token that it attends to."""

    @classmethod
    def of(cls, model: EngineModel) -> LinearEngine:
        """The line through another model: a batch of 1 and of 128; prefills of 2,048 tokens, fresh and behind 8,192."""
        few, many = model.iteration_s(_FEW), model.iteration_s(_MANY)
        sequence_s = max((many - few) / (_MANY - _FEW), 0.0)
        fresh, behind = model.prefill_s(_CHUNK), model.prefill_s(_CHUNK, _BEHIND)
        pair_s = max((behind - fresh) / (_CHUNK * _BEHIND), 0.0)
        token_s = max(fresh / _CHUNK - pair_s * _CHUNK / 2, 0.0)
        return cls(few - sequence_s, sequence_s, model.context_s, token_s, pair_s)

    def iteration_s(self, sequences: int) -> float:
        return self.fixed_s + self.sequence_s * sequences

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return _prefill_s(self, tokens, context_tokens)

    @property
    def coefficients(self) -> Array:
        """[LINE]: the factor of each sum of a span, all sequences in one."""
        return np.array([self.fixed_s, self.sequence_s, self.context_s, self.prefill_token_s, self.prefill_context_s])


@dataclass(frozen=True, slots=True)
class BentEngine:
    """An `EngineModel` whose iteration time is piecewise linear in the batch size."""

    fixed_s: float
    """Seconds of each decode iteration."""
    sequence_s: tuple[float, ...]
    """Seconds of each sequence beyond each of KNOTS, up to the next one."""
    context_s: float
    prefill_token_s: float
    prefill_context_s: float
    """Seconds of each pair of a prefilled token and a token that it attends to."""

    @classmethod
    def of(cls, coefficients: Array) -> BentEngine:
        """The engine of the factors of each sum of a span, [WORK]."""
        fixed_s, *sequence_s, context_s, token_s, pair_s = coefficients.tolist()
        return cls(fixed_s, tuple(sequence_s), context_s, token_s, pair_s)

    def iteration_s(self, sequences: int) -> float:
        pieces = zip(KNOTS, (*KNOTS[1:], sequences), self.sequence_s, strict=True)
        return self.fixed_s + sum(slope_s * max(min(sequences, end) - begin, 0) for begin, end, slope_s in pieces)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return _prefill_s(self, tokens, context_tokens)


def _prefill_s(engine: LinearEngine | BentEngine, tokens: int, context_tokens: int) -> float:
    return tokens * (engine.prefill_token_s + engine.prefill_context_s * (context_tokens + tokens / 2))


class LatencyFit:
    """The fit of one kind of engine, from any number of actors."""

    def __init__(self, prior: EngineModel, prior_weight: float = PRIOR_WEIGHT) -> None:
        self._prior = LinearEngine.of(prior)
        self._prior_weight = prior_weight
        self._products = np.zeros((len(WORK), len(WORK)))
        self._targets = np.zeros(len(WORK))

    def forget(self) -> None:
        """A step has ended: earlier data counts less from now on."""
        self._products *= KEPT
        self._targets *= KEPT

    def observe(self, requests: Requests, learn: BoolArray) -> None:
        """All requests of one actor in a span of time. Requests not in `learn` [requests] only count as load on the
        others."""
        work, seconds = spans(requests)
        whole = learn & (seconds > 0) & (requests.response_tokens > 0)
        if whole.any():
            pace_s = seconds / np.maximum(requests.response_tokens, 1)
            whole &= pace_s * SLOWEST_TO_FASTEST >= np.median(pace_s[whole])
        rows = work[whole] / seconds[whole, None]
        self._products += rows.T @ rows
        self._targets += rows.sum(axis=0)

    def observe_step(
        self, invocations: Iterable[Invocation], rollouts: Iterable[TracedRollout], max_sequences: int
    ) -> None:
        """A step of the ledger: each actor's generate calls, and the rollouts that it finished in them.

        A rollout that moved here from another actor began before the call: it counts as load only, from the call on.
        Actors that generated nothing and computed prompts for others are learned from, too.
        """
        self.forget()
        every = list(invocations)
        self._observe_prompts(every)
        calls = [call for call in every if call.work is Work.GENERATE]
        by_actor = sorted(rollouts, key=lambda rollout: rollout.actor)
        for actor, group in groupby(by_actor, key=lambda rollout: rollout.actor):
            rows = tuple(group)
            of_actor = [call for call in calls if call.replica == actor]
            came = [_came_s(row, of_actor) for row in rows]
            came_s = np.array([row.started_s if at is None else at for row, at in zip(rows, came, strict=True)])
            learn = np.array([row.started_s == at for row, at in zip(rows, came, strict=True)])
            order = np.argsort(came_s, kind="stable")
            ordered = Requests.of_rollouts([rows[index] for index in order], came_s[order], max_sequences)
            self.observe(ordered, learn[order])

    def _observe_prompts(self, calls: Sequence[Invocation]) -> None:
        """An actor computes the prompts of several calls at once, so each time in which it worked without a break is
        one row. The prompts of a call are taken to be equally long."""
        for of_actor in prompt_calls(calls).values():
            for start_s, end_s in union((call.start_s, call.end_s) for call in of_actor):
                within = [call for call in of_actor if start_s <= call.start_s < end_s]
                row = np.zeros(len(WORK))
                row[-2] = sum(call.input_tokens - call.cached_tokens for call in within)
                row[-1] = sum(map(_pairs, within))
                row /= end_s - start_s
                self._products += np.outer(row, row)
                self._targets += row

    def model(self) -> BentEngine:
        """The best coefficients so far; the prior's before there is data."""
        line, free = self._prior.coefficients, self._prior.fixed_s * _FREE
        line = self._held_to(line, free, _LINE)
        best = self._held_to(_LINE @ line, _LINE @ free, np.eye(len(WORK)))
        best[0] = max(best[0], LEAST * self._prior.iteration_s(1) - best[1])
        return BentEngine.of(best)

    def _held_to(self, before: Array, free: Array, terms: Array) -> Array:
        """The best coefficients of `terms` [WORK, terms], each pulled towards its value `before`. `free` is the unit of
        those that were 0."""
        unit = np.where(before > 0, before, free)
        # In such units coefficients are about 1, and the soft bound is a multiple of the unit matrix.
        products = terms.T @ self._products @ terms * np.outer(unit, unit) + self._prior_weight * np.eye(unit.size)
        targets = terms.T @ self._targets * unit + self._prior_weight * before / unit
        return np.asarray(unit * _non_negative(products, targets))


def prompt_calls(calls: Iterable[Invocation]) -> dict[str, list[Invocation]]:
    """The calls in which actors computed prompts for others, by actor. One that generates computes or takes its own."""
    every = list(calls)
    generate = {call.replica for call in every if call.work is Work.GENERATE}
    found: dict[str, list[Invocation]] = defaultdict(list)
    for call in every:
        if call.work is Work.PRECOMPUTE and call.replica not in generate:
            found[call.replica].append(call)
    return found


def _pairs(call: Invocation) -> float:
    """Of a computed token and one that it attends to."""
    new, prompts = call.input_tokens - call.cached_tokens, max(call.sequences, 1)
    return new * (call.cached_tokens + new / 2) / prompts


def _came_s(rollout: TracedRollout, calls: Iterable[Invocation]) -> float | None:
    """When a rollout came to the actor of these calls: it began in one, or moved here with the first of those in which
    it ended. None if it ended in none."""
    ended_in = [call.start_s for call in calls if call.start_s <= rollout.finished_s <= call.end_s]
    if not ended_in:
        return None
    return max(rollout.started_s, min(ended_in))


def _non_negative(products: Array, targets: Array) -> Array:
    """Least squares without negative coefficients: the best of all sets of coefficients that may be positive."""
    best, best_value = np.zeros(len(targets)), 0.0
    for chosen in range(1, 2 ** len(targets)):
        terms = [index for index in range(len(targets)) if chosen >> index & 1]
        solution = np.linalg.solve(products[np.ix_(terms, terms)], targets[terms])
        value = float(targets[terms] @ solution)  # by how much the squared error falls
        if value > best_value and (solution >= 0).all():
            best_value = value
            best = np.zeros(len(targets))
            best[terms] = solution
    return best
