"""Time of one actor for any group of a list of samples, in closed form.

A list holds samples from short to long; a group is a contiguous part [i, j) of it. The sequences of a group start
together, and the batch shrinks as they end. With a(B) piecewise linear (`fit_iteration_times`), with bends c_h at the
knots b_h, the iterations of the group take

    a(B) summed = at_zero max(l) + slope_0 sum(l) + sum_h c_h (sum of all but the b_h longest l)

because B(t) summed over time is the sum of the lengths, and (B(t) - b)+ summed is the sum of all but the b longest.
Attention adds g (l p + l (l - 1) / 2) per sequence, and each prompt is prefilled once. All terms are differences of
prefix sums, so the time of any group takes O(pieces), and the longest group under a time limit takes one binary search.

Shared prefixes (`PrefixTree`): the list charges a prefix to the first sample of each run of samples that share it, and
a group that starts inside a run pays for it again. This is exact if the users of a prefix are adjacent, else an upper
bound.

Waves: a group may exceed the engine's capacity (KV tokens at the final lengths, or its limit of sequences). The longest
sequences that fit then start first, and each waiting sequence is admitted when another ends. It adds its tokens at the
rate of a full batch of similar sequences: a(B) / B seconds per token, with B the mean of the numbers of sequences that
fit when counting up and down the list from it. This is exact for waves of equal lengths.

Waits for an environment: an actor and its sessions are a closed queueing network, in which a session is either in the
engine's batch or waits (`NetworkTimes`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhfless.prefixes.tree import PrefixTree
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.policy import Ints, ReplicaSlot

Floats = NDArray[np.float64]

TOLERANCE = 1e-3
"""Maximum relative error of a piece of a(B): a tenth of the one percent by which a plan may miss the optimum."""

MOST_PIECES = 12
"""Maximum number of pieces of a(B). Batches padded to captured sizes would need two pieces per stair; the tolerance is
doubled until this many suffice, because each piece adds an array of the length of the step."""


class CapacityError(ValueError):
    """Raised if a single response exceeds the KV cache of an actor. The message names its device."""


@dataclass(frozen=True, slots=True)
class Responses:
    """The samples that a step has to generate; created by `responses`."""

    tokens: Floats  # [samples]: predicted response tokens, without the prompt
    prompt: Ints  # [samples]: index of the prompt; siblings share one
    prompt_tokens: Floats  # [prompts]
    order: Ints | None = None
    """[samples]: the list to cut, from short to long as predicted, siblings adjacent. For lengths that stand for
    distributions: which sibling is the long one is unknown, so no group may depend on it."""
    longest: Floats | None = None
    """[samples], in that order, ascending: the assumed length of a group that ends with this sample; defaults to its
    longest sample."""
    prefixes: PrefixTree | None = None
    """Prefixes shared between prompts, each prefilled once per actor. None if unknown."""

    @property
    def tree(self) -> PrefixTree:
        """Return `prefixes`, empty if unknown."""
        return PrefixTree.nothing(self.prompt_tokens.size) if self.prefixes is None else self.prefixes

    @property
    def list_order(self) -> Ints:
        """Return `order` `[samples]`; by default ascending by length, samples of equal length by prompt."""
        return np.lexsort((self.prompt, self.tokens)) if self.order is None else self.order


def responses(
    tokens: ArrayLike, prompt: ArrayLike, prompt_tokens: ArrayLike, prefixes: PrefixTree | None = None
) -> Responses:
    """Convert `tokens` [samples], `prompt` [samples], `prompt_tokens` [prompts] and their `prefixes`.

    Raises ValueError for a length below 1 or not finite.
    """
    lengths = np.asarray(tokens, float)
    if not (lengths.size and np.isfinite(lengths).all() and (lengths >= 1).all()):
        raise ValueError(f"tokens is {lengths}; give one predicted length per sample, 1 token or more, finitely many")
    return Responses(lengths, np.asarray(prompt, np.int64), np.asarray(prompt_tokens, float), prefixes=prefixes)


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """a(B) as linear pieces, for B from 1 to `knots[-1]`.

    Piece m spans `knots[m]` to `knots[m + 1]`; the first one is `at_zero_s + slopes_s[0] B`.
    """

    knots: tuple[int, ...]
    slopes_s: tuple[float, ...]
    at_zero_s: float

    def of(self, sequences: Floats | float) -> Floats:
        """Return a(B). B may be fractional, from 1 to the last knot."""
        batch = np.asarray(sequences, float)
        values = self.at_zero_s + self.slopes_s[0] * batch
        for knot, (before, after) in zip(self.knots[1:-1], pairwise(self.slopes_s), strict=True):
            values += (after - before) * np.maximum(batch - knot, 0.0)
        return np.asarray(values, float)


def fit_iteration_times(table_s: Sequence[float]) -> IterationTimes:
    """Fit pieces to a table, where `table_s[B - 1]` is a(B). Dips are levelled: more sequences never take less time.

    Raises ValueError for an empty table or a value that is not positive and finite.
    """
    table = np.asarray(table_s, float)
    if table.size == 0 or not (np.isfinite(table).all() and (table > 0).all()):
        raise ValueError("iteration_s of an engine model must be positive and finite for every batch size")
    table = np.maximum.accumulate(table)
    tolerance = TOLERANCE
    while len(knots := _knots(table, tolerance)) > MOST_PIECES + 1:
        tolerance *= 2
    if len(knots) == 1:
        return IterationTimes((1, 1), (0.0,), float(table[0]))
    at = np.asarray(knots) - 1
    slopes = np.diff(table[at]) / np.diff(at)
    return IterationTimes(tuple(knots), tuple(slopes.tolist()), float(table[0] - slopes[0]))


def _knots(table: Floats, tolerance: float) -> list[int]:
    """Return the batch sizes at which the pieces meet.

    Each piece is as long as the tolerance allows (a cone of slopes).
    """
    values = table.tolist()
    knots, start = [1], 0
    while start < len(values) - 1:
        low, high, end = -np.inf, np.inf, start + 1
        for index in range(start + 1, len(values)):
            run, value = index - start, values[index]
            if low <= (value - values[start]) / run <= high:
                end = index
            low = max(low, (value * (1 - tolerance) - values[start]) / run)
            high = min(high, (value * (1 + tolerance) - values[start]) / run)
            if low > high:
                break
        knots.append(end + 1)
        start = end
    return knots


@dataclass(frozen=True)
class ActorType:
    """The common properties of a run's actors: their engine, and the price of their devices."""

    kind: str  # Device kind
    engine: EngineModel
    kv_capacity_tokens: int
    max_sequences: int  # Most sequences that the engine runs at once
    usd_per_s: float  # Price of all devices of one actor

    @cached_property
    def iteration_times(self) -> IterationTimes:
        """Return a(B) up to `max_sequences`."""
        return fit_iteration_times([self.engine.iteration_s(size) for size in range(1, self.max_sequences + 1)])

    @cached_property
    def table_s(self) -> Floats:
        """Return a(1), a(2), ... `[max_sequences]` by the pieces."""
        return self.iteration_times.of(np.arange(1, self.max_sequences + 1, dtype=np.float64))

    def drain_s(self, tokens: Floats, context: Ints, longest: float) -> float:
        """Return the seconds in which an actor generates `tokens` [samples] after `context` [samples].

        One sample may take until `longest`. Uses the closed form of the module without prefills. Samples that do not
        fit at once are the shorter ones, and generate at the rate of a full batch.
        """
        ordered, most = np.sort(tokens)[::-1], self.max_sequences
        running = ordered[:most]
        spans = running - np.append(running[1:], 0.0)
        seconds = float(spans @ self.table_s[: running.size])
        seconds += float(self.table_s[-1]) / most * float(ordered[most:].sum())
        seconds += float(self.table_s[0]) * max(longest - float(ordered[0]), 0.0)
        return seconds + self.engine.context_s * float(tokens @ (context + (tokens - 1) / 2))


class ActorTypeCache:
    """Cache of the last slot's actor type, so that an engine model's iteration times are fitted once."""

    def __init__(self) -> None:
        self._last: ActorType | None = None

    def of(self, slot: ReplicaSlot) -> ActorType:
        """Return the actor type of a generation slot."""
        engine, last = slot.engine, self._last
        assert engine is not None  # callers take slots from Layout.generation
        made = ActorType(slot.kind, engine.model, engine.kv_capacity_tokens, engine.max_sequences, slot.usd_per_s)
        if last is None or last.engine is not made.engine or last != made:
            last = self._last = made
        return last


@dataclass(frozen=True, slots=True)
class NetworkTimes:
    """Times of groups whose sequences wait for their environment: a closed queueing network.

    A group would take S seconds without waits: f = a(0) x its longest length, which that sequence generates alone, and
    the rest r = S - f, which the sequences of a batch add to each other's iterations. If the longest sequence waits for
    z seconds in all, it is in the batch for (t - z) / t of the group's time t. So are the others, who add only this
    share of r to its iterations:

        t = z + f + r (t - z) / t,    so t = (u + sqrt(u^2 - 4 z r)) / 2 with u = z + f + r

    This is S without waits, z + f if it is alone, and S again if the engine is always busy: others' work then fills the
    waits (the asymptotic bounds of closed networks: Denning and Buzen, ACM Computing Surveys 10, 1978).
    """

    at_zero_s: float
    """a(0): see IterationTimes."""
    token_s: float
    """Seconds for which a sequence waits for its environment, per token of its response."""

    def of(self, work_s: Floats, longest: Floats) -> Floats:
        """Return the seconds of groups that take `work_s` without waits, elementwise."""
        alone_s, waits_s = self.at_zero_s * longest, self.token_s * longest
        rest_s = np.maximum(work_s - alone_s, 0.0)
        total_s = alone_s + rest_s + waits_s
        return np.asarray((total_s + np.sqrt(np.maximum(total_s**2 - 4 * waits_s * rest_s, 0.0))) / 2)

    def work_s(self, limit_s: float, longest: float) -> float:
        """Return the most `work_s` with which a group ends within a limit; below 0 if its longest sequence does not."""
        alone_s, waits_s = self.at_zero_s * longest, self.token_s * longest
        if waits_s == 0 or limit_s == np.inf:
            return limit_s
        if limit_s < alone_s + waits_s:
            return -1.0
        return alone_s + (limit_s - alone_s - waits_s) * limit_s / (limit_s - waits_s)


class GroupTimes:
    """Times of all groups of a list.

    With n samples and m pieces of a(B), a group whose size falls in piece k takes `end[k, j] - start[k, i]`, where
    `end` and `start` are [m, n + 1].
    """

    def __init__(self, actor: ActorType, step: Responses, order: Ints, wait_token_s: float = 0.0) -> None:
        """Precompute the sums. `order` [samples] lists the samples from short to long. `wait_token_s`: see
        NetworkTimes. Raises CapacityError."""
        tokens, prompt = step.tokens[order], step.prompt[order]
        context = step.prompt_tokens[prompt]
        reading_s = actor.engine.context_s * tokens * (context + (tokens - 1) / 2)
        self._times = actor.iteration_times
        self._lengths = _sums(tokens)
        own, shared = step.prompt_tokens - step.tree.shared_tokens, step.tree.own_tokens.astype(float)
        held_tokens, _ = _charges(step.tree, own, shared, prompt)
        charged_s, again_s = _charges(step.tree, *_prefills_s(actor.engine, step), prompt)
        self._rest = _sums(reading_s + charged_s)
        longest = np.maximum.accumulate(tokens) if step.longest is None else step.longest
        self._longest = np.concatenate(([0.0], longest))
        self._network = NetworkTimes(actor.iteration_times.at_zero_s, wait_token_s)
        self._end_s, self._start_s = self._pieces(self._longest)
        if (most := float((tokens + context).max())) > actor.kv_capacity_tokens:
            raise CapacityError(
                f"{actor.kind}: kv_capacity_tokens is {actor.kv_capacity_tokens}, too little for a response that has "
                f"{most:.0f} tokens with its prompt; offer only devices with more memory, or cap the lengths"
            )
        self._floor, self._waiting_s = self._waves(actor, _sums(tokens + held_tokens), float(context.max()))
        self._again_s = np.append(again_s, 0.0)
        self._lists = (
            self._end_s.tolist(),
            self._start_s.tolist(),
            self._floor.tolist(),
            self._waiting_s.tolist(),
            self._again_s.tolist(),
        )
        """The same values as lists: reading single elements is several times faster."""

    def _pieces(self, running_longest: Floats) -> tuple[Floats, Floats]:
        times, sums = self._times, self._lengths
        end = times.at_zero_s * running_longest + self._rest + times.slopes_s[0] * sums
        ends = [end]
        for knot, bend in zip(times.knots[1:-1], np.diff(times.slopes_s), strict=True):
            end = end.copy()
            end[knot:] += bend * sums[: max(sums.size - knot, 0)]
            ends.append(end)
        return np.stack(ends), np.stack([slope * sums + self._rest for slope in times.slopes_s])

    def _waves(self, actor: ActorType, kv_tokens: Floats, longest_prompt: float) -> tuple[Ints, Floats]:
        """Return the first sample run at once for each end of a group, and prefix sums of waiting samples' seconds.

        Both are [samples + 1].
        """
        # A group that starts among siblings holds their prompt too, so memory for one more prompt is kept free.
        free_tokens = actor.kv_capacity_tokens - longest_prompt
        ends = np.arange(kv_tokens.size)
        by_memory = np.minimum(np.searchsorted(kv_tokens, kv_tokens - free_tokens, side="left"), ends - 1)
        floor = np.maximum(by_memory, np.maximum(ends - actor.max_sequences, 0))
        upwards = np.searchsorted(floor, ends[:-1], side="right") - 1 - ends[:-1]
        at_once = np.maximum(upwards, (upwards + ends[1:] - floor[1:]) / 2)
        return floor, _sums(np.diff(self._lengths) * self._times.of(at_once) / at_once) + self._rest

    def time_s(self, begin: Ints, end: Ints) -> Floats:
        """Return the seconds of the groups [begin, end), elementwise, with begin < end; shapes may be broadcast."""
        fitting = np.maximum(begin, self._floor[end])
        piece = np.asarray(self._times.knots[1:-1], np.int64).searchsorted(end - fitting, side="left")
        working = self._end_s[piece, end] - self._start_s[piece, fitting]
        waiting = self._waiting_s[fitting] - self._waiting_s[begin]
        return self._network.of(np.asarray(working + waiting + self._again_s[begin]), self._longest[end])

    def one_s(self, begin: int, end: int) -> float:
        """Return the seconds of the non-empty group [begin, end)."""
        return float(self._network.of(np.asarray(self._work_s(begin, end)), self._longest[end]))

    def _work_s(self, begin: int, end: int) -> float:
        """Return the seconds of the non-empty group [begin, end) without waits."""
        end_s, start_s, floor, waiting_s, again_s = self._lists
        fitting = max(begin, floor[end])
        piece = bisect_left(self._times.knots, end - fitting, 1, len(self._times.knots) - 1) - 1
        working_s: float = end_s[piece][end] - start_s[piece][fitting]
        seconds: float = working_s + waiting_s[fitting] - waiting_s[begin] + again_s[begin]
        return seconds

    def longest_group(self, end: int, limit_s: float) -> tuple[int, float]:
        """Return the smallest `begin` for which [begin, end) takes at most `limit_s`, and its seconds.

        Returns (end, 0.0) if not even the last sample fits.
        """
        again_s, longest = self._lists[-1], float(self._longest[end])
        work_limit_s = self._network.work_s(limit_s, longest)
        begin, seconds = self._without_repeat(end, work_limit_s)
        seconds += again_s[begin]
        # A group that starts among siblings prefills their prompt again.
        while begin < end and seconds > work_limit_s:
            begin += 1
            seconds = self._work_s(begin, end) if begin < end else 0.0
        if begin == end:
            return end, 0.0
        if self._network.token_s == 0:
            return begin, seconds
        return begin, min(float(self._network.of(np.asarray(seconds), np.asarray(longest))), limit_s)

    def _without_repeat(self, end: int, limit_s: float) -> tuple[int, float]:
        """Like `longest_group`, without charging a prompt again whose siblings are split."""
        ends_s, starts_s, floors, waiting_s, _ = self._lists
        knots, floor, piece = self._times.knots, floors[end], 0
        last = len(knots) - 2
        while True:
            end_s, start_s = ends_s[piece][end], starts_s[piece]
            low = floor if piece == last else max(end - knots[piece + 1], floor)
            if low == floor or end_s - start_s[low] > limit_s:
                break
            piece += 1
        low = bisect_left(start_s, end_s - limit_s, low, end - knots[piece] if piece > 0 else end)
        if low > floor or floor == 0:
            return low, end_s - start_s[low] if low < end else 0.0
        all_s = end_s - start_s[floor] + waiting_s[floor]
        low = bisect_left(waiting_s, all_s - limit_s, 0, floor)
        seconds: float = all_s - waiting_s[low]
        return low, seconds


def _prefills_s(engine: EngineModel, step: Responses) -> tuple[Floats, Floats]:
    """Return the seconds to prefill each prompt [prompts] and each shared prefix [prefixes].

    A prompt counts beyond its shared prefixes, a prefix beyond its parent. Both are differences of whole prefills: an
    engine processes the parts of many prompts in one iteration, so no part pays for an iteration of its own.
    """
    tree = step.tree
    sizes, where = np.unique(np.concatenate([step.prompt_tokens, tree.tokens]), return_inverse=True)
    whole_s = np.array([engine.prefill_s(int(size)) if size else 0.0 for size in sizes])[where]
    prompts_s, prefixes_s = np.split(whole_s, [step.prompt_tokens.size])
    before_s = np.append(prefixes_s, 0.0)
    return prompts_s - before_s[tree.leaf], prefixes_s - before_s[tree.parent]


def _charges(tree: PrefixTree, own: Floats, shared: Floats, prompt: Ints) -> tuple[Floats, Floats]:
    """Return each sample's charge to its group, and its extra charge as the group's first sample, both [samples].

    They are computed from `own` [prompts] and `shared` [prefixes].
    """
    shared, levels = np.append(shared, 0.0), tree.levels[:, prompt]
    charged, whole = np.where(_starts_run(prompt), own[prompt], 0.0), own[prompt]
    for level in levels:
        charged += np.where(_starts_run(level), shared[level], 0.0)
        whole = whole + shared[level]
    return charged, whole - charged


def _sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, 2, ... values, `[samples + 1]`."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _starts_run(number: Ints) -> NDArray[np.bool_]:
    return np.concatenate(([True], number[1:] != number[:-1]))
