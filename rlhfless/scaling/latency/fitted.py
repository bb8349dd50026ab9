"""An engine model fitted to the run's own ledger while it runs: non-negative least squares with forgetting. Pure.

    seconds of a span = c0 iterations + c1 sequences + g context + p prefill + q prefill x its context

See `timeline` for the sums. Each row is divided by its seconds, so relative errors count. Only the sums of products are
kept, so memory does not grow with the run. A prior, such as a roofline, is used before there is data, and later
determines terms that the data cannot separate: each coefficient is pulled towards its prior, in relative terms.
Afterwards c1 may differ between small and large batches, each pulled towards the c1 of the line, so batch sizes not
seen stay on the line.

`EngineSpeeds` has one fit per kind of device. A fit starts with a prior: the device's data sheet plus the engine's
own overhead. The prior determines the first step, and terms that the run's batches cannot separate. On a CPU core the
engine's scheduler and sampler share the core with the model, and with a small model they take nearly all the time:
`OVERHEAD_S` and `SEQUENCE_S`. A prior without them would predict a step so short that a single actor suffices. An
unknown accelerator is assumed to be the slowest in the table rather than a CPU core, because a prior that is a
thousand times too slow would start every actor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from rlhfless.records import Invocation, Work
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.accounting import union
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.latency.timeline import KNOTS, WORK, Array, BoolArray, Requests, spans
from rlhfless.scaling.placement import CPU_KIND

KEPT = 0.8
"""Weight of all earlier steps at each new one: an engine's speed changes with its neighbours, seldom more."""

PRIOR_WEIGHT = 0.1
"""The prior weighs as much as a tenth of a row whose only term takes all of its time, so it determines only what
rows cannot."""

LEAST = 0.01
"""Minimum time of an iteration, as a share of the prior's time for one sequence. If all batches of a step are full,
prefills may explain all of its time, and plans cannot be made with free iterations."""

SLOWEST_TO_FASTEST = 20
"""Maximum ratio between the median time per token and a row's. The order of waiting requests is a guess; if it is
wrong, a request seems to start just before it ends, and its row would outweigh all others."""

# Batches and prefills at which a prior model is evaluated to fit a line to it.
_FEW, _MANY = 1, 128
_CHUNK, _BEHIND = 2048, 8192

# [WORK, LINE]: a line has one coefficient for the sequences of all batches.
_LINE = np.zeros((len(WORK), len(WORK) - len(KNOTS) + 1))
_LINE[0, 0] = 1
_LINE[1 : len(KNOTS) + 1, 1] = 1
_LINE[len(KNOTS) + 1 :, 2:] = np.eye(3)

# The unit of a term that the prior sets to 0: as much as the fixed part, in a batch of 128 contexts of 1,024.
_FREE = np.array([1, 1 / _MANY, 1 / (_MANY * 1024), 1 / _MANY, 1 / (_MANY * 1024)])


@dataclass(frozen=True, slots=True)
class LinearEngine:
    """An `EngineModel` with five coefficients, for an engine that has not run yet."""

    fixed_s: float
    """Seconds per decode iteration."""
    sequence_s: float
    """Seconds per sequence in an iteration."""
    context_s: float
    prefill_token_s: float
    prefill_context_s: float
    """Seconds per pair of a prefilled token and a token that it attends to."""

    @classmethod
    def of(cls, model: EngineModel) -> LinearEngine:
        """Return a line through another model: batches of 1 and 128; prefills of 2,048 tokens, fresh and after
        8,192."""
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
        """Return the factor of each sum of a span [LINE], with all sequences in one term."""
        return np.array([self.fixed_s, self.sequence_s, self.context_s, self.prefill_token_s, self.prefill_context_s])


@dataclass(frozen=True, slots=True)
class BentEngine:
    """An `EngineModel` whose iteration time is piecewise linear in the batch size."""

    fixed_s: float
    """Seconds per decode iteration."""
    sequence_s: tuple[float, ...]
    """Seconds per sequence beyond each of KNOTS, up to the next one."""
    context_s: float
    prefill_token_s: float
    prefill_context_s: float
    """Seconds per pair of a prefilled token and a token that it attends to."""

    @classmethod
    def of(cls, coefficients: Array) -> BentEngine:
        """Return the engine with these factors of a span's sums [WORK]."""
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
        """Reduce the weight of earlier data, at the end of a step."""
        self._products *= KEPT
        self._targets *= KEPT

    def observe(self, requests: Requests, learn: BoolArray) -> None:
        """Add all requests of one actor in a span of time.

        Requests not in `learn` [requests] count only as load on the others.
        """
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
        """Add a step of the ledger: each actor's generate calls, and the rollouts finished in them.

        A rollout that migrated from another actor started before the call; it counts as load only, from the call on.
        Each turn of an episode is a request; those that ended before a call of the actor were made elsewhere.
        Actors that generated nothing and computed prompts for others are included.
        """
        self.forget()
        every = list(invocations)
        self._observe_prompts(every)
        calls = [call for call in every if call.work is Work.GENERATE]
        by_actor = sorted(rollouts, key=lambda rollout: rollout.actor)
        for actor, group in groupby(by_actor, key=lambda rollout: rollout.actor):
            of_actor = [call for call in calls if call.replica == actor]
            rows, came = _requests(group, of_actor)
            came_s = np.array([row.started_s if at is None else at for row, at in zip(rows, came, strict=True)])
            learn = np.array([row.started_s == at for row, at in zip(rows, came, strict=True)])
            order = np.argsort(came_s, kind="stable")
            ordered = Requests.of_rollouts([rows[index] for index in order], came_s[order], max_sequences)
            self.observe(ordered, learn[order])

    def _observe_prompts(self, calls: Sequence[Invocation]) -> None:
        """Add calls that computed prompts, assuming equal lengths within a call.

        An actor processes several calls at once, so each uninterrupted period of work is one row.
        """
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
        """Return the engine with the best coefficients so far, or the prior's before there is data."""
        line, free = self._prior.coefficients, self._prior.fixed_s * _FREE
        line = self._held_to(line, free, _LINE)
        best = self._held_to(_LINE @ line, _LINE @ free, np.eye(len(WORK)))
        best[0] = max(best[0], LEAST * self._prior.iteration_s(1) - best[1])
        return BentEngine.of(best)

    def _held_to(self, before: Array, free: Array, terms: Array) -> Array:
        """Return the best coefficients of `terms` [WORK, terms], each pulled towards its value in `before`.

        `free` is the unit of those that were 0.
        """
        unit = np.where(before > 0, before, free)
        # In these units coefficients are about 1, and the soft bound is a multiple of the unit matrix.
        products = terms.T @ self._products @ terms * np.outer(unit, unit) + self._prior_weight * np.eye(unit.size)
        targets = terms.T @ self._targets * unit + self._prior_weight * before / unit
        return np.asarray(unit * _non_negative(products, targets))


def prompt_calls(calls: Iterable[Invocation]) -> dict[str, list[Invocation]]:
    """Return, by actor, the calls in which actors computed prompts for others.

    Generating actors are excluded: they compute or receive their own prompts.
    """
    every = list(calls)
    generate = {call.replica for call in every if call.work is Work.GENERATE}
    found: dict[str, list[Invocation]] = defaultdict(list)
    for call in every:
        if call.work is Work.PRECOMPUTE and call.replica not in generate:
            found[call.replica].append(call)
    return found


def _pairs(call: Invocation) -> float:
    """Return the pairs of a computed token and a token that it attends to."""
    new, prompts = call.input_tokens - call.cached_tokens, max(call.sequences, 1)
    return new * (call.cached_tokens + new / 2) / prompts


def _requests(
    rollouts: Iterable[TracedRollout], calls: Sequence[Invocation]
) -> tuple[list[TracedRollout], list[float | None]]:
    """Return the requests of an actor's rollouts, and when each came (`_came_s`)."""
    found = [(row, _came_s(row, calls), rollout) for rollout in rollouts for row in rollout.requests]
    kept = [(row, came) for row, came, rollout in found if came is not None or row is rollout]
    return [row for row, _ in kept], [came for _, came in kept]


def _came_s(rollout: TracedRollout, calls: Iterable[Invocation]) -> float | None:
    """Return when a rollout came to the actor of these calls, or None if it ended in none of them.

    This is its start within a call or, after a migration, the start of the first call in which it ended.
    """
    ended_in = [call.start_s for call in calls if call.start_s <= rollout.finished_s <= call.end_s]
    if not ended_in:
        return None
    return max(rollout.started_s, min(ended_in))


def _non_negative(products: Array, targets: Array) -> Array:
    """Solve least squares with non-negative coefficients by trying all sets of positive coefficients."""
    best, best_value = np.zeros(len(targets)), 0.0
    for chosen in range(1, 2 ** len(targets)):
        terms = [index for index in range(len(targets)) if chosen >> index & 1]
        solution = np.linalg.solve(products[np.ix_(terms, terms)], targets[terms])
        value = float(targets[terms] @ solution)  # reduction of the squared error
        if value > best_value and (solution >= 0).all():
            best_value = value
            best = np.zeros(len(targets))
            best[terms] = solution
    return best


STEPS_REPLAYED = 20
"""Number of trace steps that a resumed run learns from: the fit would weight older steps below 1 %."""

OVERHEAD_S = 0.009
"""Seconds per iteration of vLLM's CPU engine excluding the model: 6 to 12 ms on one server core, measured with a
model of 0.5 million parameters, whose own time is negligible (fits to the ledger of the bundled demo, 2026-11)."""

SEQUENCE_S = 1.8e-4
"""Seconds per sequence of an iteration excluding the model: 0.2 ms by the same fits, including 0.02 ms of the model."""

SLOWEST = "l4"
"""The slowest accelerator in the table of devices."""


class EngineSpeeds:
    """A latency model for each kind of device. Until its first step, a kind uses the prior."""

    def __init__(self, shape: ModelShape | None, tensor_parallel: int, max_sequences: int) -> None:
        self._shape = shape
        self._tensor_parallel = tensor_parallel
        self._max_sequences = max_sequences
        self._fits: dict[str, LatencyFit] = {}

    def model(self, kind: str) -> BentEngine:
        """Return the best known model of the engines on a kind of device."""
        return self._fit(kind).model()

    def learn(
        self, invocations: Iterable[Invocation], rollouts: Iterable[TracedRollout], kinds: Mapping[str, str]
    ) -> None:
        """Learn from a step of the ledger.

        `kinds` maps actor names to device kinds, including actors that compute prompts for others. Other actors are
        ignored.
        """
        calls, rows = list(invocations), list(rollouts)
        for kind in sorted(set(kinds.values())):
            generated = [row for row in rows if kinds.get(row.actor) == kind]
            of_kind = [call for call in calls if kinds.get(call.replica) == kind]
            if generated or prompt_calls(of_kind):
                self._fit(kind).observe_step(of_kind, generated, self._max_sequences)

    def learn_trace(self, trace: Trace) -> None:
        """Learn from the trace of an earlier attempt."""
        kinds = {holding.replica: holding.device_kind for holding in trace.holdings}
        steps = sorted({row.step for row in trace.rollouts})[-STEPS_REPLAYED:]
        for step in steps:
            calls = [call for call in trace.invocations if call.step == step]
            self.learn(calls, [row for row in trace.rollouts if row.step == step], kinds)

    def _fit(self, kind: str) -> LatencyFit:
        if kind not in self._fits:
            self._fits[kind] = LatencyFit(prior_of(kind, self._shape, self._tensor_parallel))
        return self._fits[kind]


def prior_of(kind: str, shape: ModelShape | None, tensor_parallel: int = 1) -> EngineModel:
    """Return the prior of an engine on `tensor_parallel` devices of a kind.

    A model of unknown shape is assumed to have size 0 and to run on a CPU core.
    """
    own = LinearEngine(OVERHEAD_S, SEQUENCE_S, 0.0, 0.0, 0.0)
    if shape is None:
        return own
    devices = load_devices()
    sheet = Roofline(shape, devices.get(kind, devices[SLOWEST]), tensor_parallel)
    if kind != CPU_KIND:
        return sheet
    line = LinearEngine.of(sheet)
    return replace(line, fixed_s=line.fixed_s + own.fixed_s, sequence_s=line.sequence_s + own.sequence_s)
