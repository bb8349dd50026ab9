"""What an engine did in a span of time, from the start and the end of each of its requests. Pure.

No engine reports its iterations, and they need not be reported: a running sequence draws one token per iteration. So
while request i ran there were as many decode iterations as it drew tokens; the sum of batch sizes over them is the
number of tokens that all drew meanwhile; the sum of contexts is what those tokens read; and what had to be prefilled is
known from the prompts. Each request is one such span. Within its own span a sequence is taken to draw at an even pace.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhfless.records.traces import TracedRollout

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one engine: each [requests]."""

    prompt_tokens: Array
    cached_tokens: Array
    """Prompt tokens whose KV was there already."""
    response_tokens: Array
    started_s: Array
    """When it ran, not when it was asked for: see `admitted_s`."""
    finished_s: Array

    @classmethod
    def of_rollouts(cls, rows: Sequence[TracedRollout], max_sequences: int) -> Requests:
        """The rollouts of one actor, ascending by `started_s`; more than `max_sequences` at a time have waited."""
        finished_s = np.array([row.finished_s for row in rows])
        return cls(
            np.array([row.prompt_tokens for row in rows], dtype=np.float64),
            np.array([row.cached_tokens for row in rows], dtype=np.float64),
            np.array([row.response_tokens for row in rows], dtype=np.float64),
            admitted_s(np.array([row.started_s for row in rows]), finished_s, max_sequences),
            finished_s,
        )


def admitted_s(asked_s: Array, finished_s: Array, max_sequences: int) -> Array:
    """When each request [requests], ascending by `asked_s`, began to run: first come, first served."""
    running: list[float] = []
    admitted = np.empty(len(asked_s))
    for index, (asked, finished) in enumerate(zip(asked_s.tolist(), finished_s.tolist(), strict=True)):
        free = heapq.heappop(running) if len(running) >= max_sequences else asked
        admitted[index] = min(max(asked, free), finished)
        heapq.heappush(running, finished)
    return admitted


WORK = ("iterations", "sequences", "context", "prefill", "prefill_context")
"""Columns of `spans`: what the terms of an engine model are multiplied with."""


def spans(requests: Requests) -> tuple[Array, Array]:
    """Work [requests, WORK] done while each request ran, and how long that took [requests]."""
    start, end = requests.started_s, requests.finished_s
    tokens, read = _drawn(requests, start, end)
    new = requests.prompt_tokens - requests.cached_tokens
    prefilled = _between(start, new, start, end)
    prefill_read = _between(start, new * (requests.cached_tokens + new / 2), start, end)
    work = np.stack([requests.response_tokens, tokens, read, prefilled, prefill_read], axis=1)
    return work, end - start


def _between(at: Array, amount: Array, start: Array, end: Array) -> Array:
    """Sum of the amounts [requests] with start <= at < end, for each span."""
    order = np.argsort(at, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(amount[order])])
    result: Array = total[np.searchsorted(at[order], end)] - total[np.searchsorted(at[order], start)]
    return result


def _drawn(requests: Requests, start: Array, end: Array) -> tuple[Array, Array]:
    """Tokens that all requests drew in each span, and the context that those tokens read.

    A request at an even pace v has drawn n = v (t - its start) tokens and read (prompt + n / 2) n: a polynomial in
    time. Their sum is one polynomial between any two events; the coefficients are running sums over the events.
    """
    origin = float(requests.started_s.min())
    first, last = requests.started_s - origin, requests.finished_s - origin
    pace = requests.response_tokens / np.maximum(last - first, 1e-9)
    prompt, length = requests.prompt_tokens, requests.response_tokens
    # n = pace t - pace first; read = prompt n + n n / 2, as coefficients of 1, t, t t.
    drawing = np.stack([-pace * first, pace, np.zeros_like(pace)], axis=1)
    half_pace = pace**2 / 2
    constant = -prompt * pace * first + half_pace * first**2
    reading = np.stack([constant, prompt * pace - 2 * half_pace * first, half_pace], axis=1)
    done = np.stack([length, prompt * length + length**2 / 2], axis=1)
    coefficients = np.concatenate([drawing, reading], axis=1)  # [requests, 6]
    finished = np.concatenate([done[:, :1], 0 * done, done[:, 1:], 0 * done], axis=1)
    times = np.concatenate([first, last])
    order = np.argsort(times, kind="stable")
    steps = np.cumsum(np.concatenate([coefficients, finished - coefficients])[order], axis=0)
    table = np.concatenate([np.zeros((1, 6)), steps])

    def upto(t: Array) -> tuple[Array, Array]:
        row = table[np.searchsorted(times[order], t, side="right")]
        powers = np.stack([np.ones_like(t), t, t * t], axis=1)
        return (row[:, :3] * powers).sum(axis=1), (row[:, 3:] * powers).sum(axis=1)

    (tokens_end, read_end), (tokens_start, read_start) = upto(end - origin), upto(start - origin)
    return tokens_end - tokens_start, read_end - read_start
