"""The work of an engine in spans of time, from the start and end of each of its requests. Pure.

No engine reports its iterations, and none needs to: a running sequence generates one token per iteration. While request
i ran, there were as many decode iterations as tokens it generated. The sum of batch sizes over them is the number of
tokens that all requests generated meanwhile; the sum of contexts is the context read by those tokens; and the prefilled
tokens are known from the prompts. Each request is one such span.

All running sequences advance in step, so iterations can be numbered. A request that started at iteration i and
generated n tokens ended at i + n; one that started between two known iterations is interpolated. Only there, between
two events, an even pace is assumed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhfless.records.traces import TracedRollout

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one engine; each array is [requests]."""

    prompt_tokens: Array
    cached_tokens: Array
    """Prompt tokens whose KV was already cached."""
    response_tokens: Array
    started_s: Array
    """Time at which it started to run, which may be later than its arrival; see `admitted_s`."""
    finished_s: Array

    @classmethod
    def of_rollouts(cls, rows: Sequence[TracedRollout], came_s: Array, max_sequences: int) -> Requests:
        """Return the rollouts of one actor as requests.

        `rows` are sorted by arrival at the actor. Requests beyond `max_sequences` at a time have waited.
        """
        finished_s = np.array([row.finished_s for row in rows])
        return cls(
            np.array([row.prompt_tokens for row in rows], dtype=np.float64),
            np.array([row.cached_tokens for row in rows], dtype=np.float64),
            np.array([row.response_tokens for row in rows], dtype=np.float64),
            admitted_s(came_s, finished_s, max_sequences),
            finished_s,
        )


def admitted_s(asked_s: Array, finished_s: Array, max_sequences: int) -> Array:
    """Return the time at which each request [requests], sorted by `asked_s`, started to run, first come, first
    served."""
    running: list[float] = []
    admitted = np.empty(len(asked_s))
    for index, (asked, finished) in enumerate(zip(asked_s.tolist(), finished_s.tolist(), strict=True)):
        free = heapq.heappop(running) if len(running) >= max_sequences else asked
        admitted[index] = min(max(asked, free), finished)
        heapq.heappush(running, finished)
    return admitted


KNOTS = (0, 32, 128)
"""Batch sizes at which the slope of the iteration time may change: small batches are bound by memory or the engine's
scheduler, large ones by arithmetic, with the transition around these sizes."""

WORK = ("iterations", *(f"sequences_beyond_{knot}" for knot in KNOTS), "context", "prefill", "prefill_context")
"""Columns of `spans`, the factors of an engine model's terms. Each column of sequences counts a batch's sequences
beyond its knot, up to the next one."""


def spans(requests: Requests) -> tuple[Array, Array]:
    """Return the work [requests, WORK] done while each request ran, and its duration [requests]."""
    start, end = requests.started_s, requests.finished_s
    first, last = iterations(requests)
    order = np.argsort(np.concatenate([first, last]), kind="stable")
    sequences, read = _batches(first, last, order), _read(requests, first, last, order)
    new = requests.prompt_tokens - requests.cached_tokens
    prefilled = _between(start, new, start, end)
    prefill_read = _between(start, new * (requests.cached_tokens + new / 2), start, end)
    work = np.stack([requests.response_tokens, *sequences, read, prefilled, prefill_read], axis=1)
    return work, end - start


def iterations(requests: Requests) -> tuple[Array, Array]:
    """Return the numbers of the engine's iterations at which each request [requests] started and ended."""
    begin, length = np.empty(len(requests.started_s)), requests.response_tokens
    times: list[float] = []
    numbers: list[float] = []
    for index in np.argsort(requests.started_s, kind="stable").tolist():
        start_s, end_s = float(requests.started_s[index]), float(requests.finished_s[index])
        begin[index] = _number_at(start_s, times, numbers)
        if not times or start_s > times[-1]:
            times.append(start_s)
            numbers.append(float(begin[index]))
        place = bisect_left(times, end_s)
        # Two requests may disagree by an iteration or two about the same instant; numbers never fall.
        number = max(float(begin[index] + length[index]), numbers[place - 1] if place else 0.0)
        numbers.insert(place, min(number, numbers[place]) if place < len(numbers) else number)
        times.insert(place, end_s)
    return begin, begin + length


def _number_at(time_s: float, times: list[float], numbers: list[float]) -> float:
    """Return the iteration number at a time, interpolated between known instants.

    It is constant after the last one, when nothing ran.
    """
    place = bisect_left(times, time_s)
    if place == len(times):
        return numbers[-1] if numbers else 0.0
    if place == 0 or times[place] == times[place - 1]:
        return numbers[place]
    share = (time_s - times[place - 1]) / (times[place] - times[place - 1])
    return numbers[place - 1] + share * (numbers[place] - numbers[place - 1])


def _between(at: Array, amount: Array, start: Array, end: Array) -> Array:
    """Return, for each span, the sum of the amounts [requests] with start <= at < end."""
    order = np.argsort(at, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(amount[order])])
    result: Array = total[np.searchsorted(at[order], end)] - total[np.searchsorted(at[order], start)]
    return result


def _batches(first: Array, last: Array, order: Ints) -> list[Array]:
    """Return, by knot, sums [requests] of the batch's excess over it from iteration `first` to `last` of each request.

    `order` sorts all starts and ends.
    """
    at = np.concatenate([first, last])[order]
    running = np.cumsum(np.where(order < first.size, 1, -1))  # from each event to the next
    sums = []
    for knot, following in zip(KNOTS, (*KNOTS[1:], np.inf), strict=True):
        beyond = np.minimum(np.maximum(running - knot, 0), following - knot)
        total = np.concatenate([[0.0], np.cumsum(beyond[:-1] * np.diff(at))])
        sums.append(np.interp(last, at, total) - np.interp(first, at, total))
    return sums


def _read(requests: Requests, first: Array, last: Array, order: Ints) -> Array:
    """Return the context [requests] read by all requests' tokens between `first` and `last` of each request.

    By iteration t, a request has generated n = t - first tokens and read (prompt + n / 2) n: a polynomial in t. The sum
    over requests is one polynomial between any two events, whose coefficients are running sums over the events.
    """
    prompt, length = requests.prompt_tokens, requests.response_tokens
    # n = t - first; read = prompt n + n n / 2, as coefficients of 1, t, t t.
    reading = np.stack([first**2 / 2 - prompt * first, prompt - first, np.full_like(first, 0.5)], axis=1)
    finished = np.zeros_like(reading)
    finished[:, 0] = prompt * length + length**2 / 2
    at = np.concatenate([first, last])[order]
    steps = np.cumsum(np.concatenate([reading, finished - reading])[order], axis=0)
    table = np.concatenate([np.zeros((1, 3)), steps])

    def upto(t: Array) -> Array:
        row = table[np.searchsorted(at, t, side="right")]
        total: Array = (row * np.stack([np.ones_like(t), t, t * t], axis=1)).sum(axis=1)
        return total

    return upto(last) - upto(first)
