"""Migration by value: actors are dissolved into others, or relieved, where that is worth more than it costs. Pure.

    dissolve   all samples of an actor go to another one. It saves what the actor would still have cost, and costs
               what the other one takes longer: more sequences in a batch, and the KV of those that came, computed
               again or moved. It is done if it saves more than `LEAST_GAIN` of what it gives up, and ends in time.

All is judged by the outlook: rows of expected sequences and contexts, which add up (`outlook`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.policies.forecasters import Floats
from rlhfless.scaling.policies.outlook import Alive, Engines, end_s, work_s
from rlhfless.scaling.policy import Ints

LEAST_GAIN = 0.1
"""Hysteresis: less than a tenth of what is given up is not worth a move, which may turn out wrong."""

SOURCES = 4
"""So many actors, those with the fewest samples, are tried as ones to dissolve; fuller ones hardly ever pay."""

KV_SHARE = 0.95
"""Of an actor's KV memory, how much may be filled by expectation."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What counts from now on."""

    limit_s: float
    """Everything should end by then, from now."""
    time_usd_per_s: float
    """What a second less of the step is worth."""
    confidence: float
    """With which the end of an actor is foreseen."""


class Board:
    """The actors of a step and what they have still to do. Rows [places] change as samples are moved on it."""

    def __init__(self, engines: Engines, state: Alive, ready_s: Floats, freed_usd_per_s: Floats, count: Ints) -> None:
        """`ready_s`: until an actor works; `freed_usd_per_s`: what each second less of it saves; `count`: its samples.
        All [places]."""
        self.engines = engines
        self.grid = state.grid
        self.sequences = state.sequences.copy()
        self.context = state.context_tokens.copy()
        self.ready_s = ready_s.copy()
        self.freed = freed_usd_per_s
        self.count = count.copy()
        self.hold_s = np.zeros(ready_s.size)
        """Until it has nothing left to do, as expected."""
        self.end_s = np.zeros(ready_s.size)
        """Until it has, with the confidence of the aim."""

    def judge(self, places: Ints, confidence: float) -> None:
        """Brings `hold_s` and `end_s` of places up to date."""
        self.hold_s[places], self.end_s[places] = self.trial(places, np.zeros((1, self.grid.size)), (), 0.0, confidence)

    def trial(
        self, places: Ints, sequences: Floats, context: Floats | tuple[()], delay_s: float | Floats, confidence: float
    ) -> tuple[Floats, Floats]:
        """`hold_s` and `end_s` [rows] of actors with so much more (or less) to do, after a delay."""
        more = self.sequences[places] + sequences
        read = self.context[places] + (0.0 if isinstance(context, tuple) else context)
        spans = self.engines.spans_s(places, (more, read), self.grid)
        before = self.ready_s[places] + delay_s
        return before + work_s(spans), before + end_s(spans, more, confidence)

    @property
    def last_s(self) -> float:
        """When all have ended."""
        return float(self.end_s.max())


@dataclass(frozen=True, slots=True)
class Dissolve:
    """One actor's samples to another."""

    source: int
    target: int
    saves_usd: float
    end_s: float
    """Of the target, then."""


def dissolve(board: Board, aim: Aim, able: Ints, recompute_s: Floats) -> Dissolve | None:
    """The actor whose samples are best moved to another one, or None. The board is left as it is.

    `able`: places that serve. `recompute_s` [places]: to compute the KV of a place's samples again elsewhere, or to
    move it.
    """
    working = np.flatnonzero(board.count > 0)
    best: Dissolve | None = None
    for source in working[np.argsort(board.sequences[working, 0], kind="stable")][:SOURCES].tolist():
        targets = able[(able != source) & (board.count[able] > 0)]
        if not targets.size:
            continue
        hold_s, end = board.trial(
            targets, board.sequences[source], board.context[source], recompute_s[source], aim.confidence
        )
        given_up = board.freed[source] * board.hold_s[source]
        saves = given_up - board.freed[targets] * (hold_s - board.hold_s[targets])
        others_s = _last_without(board, source, targets)
        saves -= aim.time_usd_per_s * (np.maximum(end, others_s) - board.last_s) if aim.time_usd_per_s else 0.0
        allowed = (end <= max(aim.limit_s, 0.0)) & _fits(board, source, targets) & (saves > LEAST_GAIN * given_up)
        if allowed.any():
            at = int(np.argmax(np.where(allowed, saves, -math.inf)))
            if best is None or saves[at] > best.saves_usd:
                best = Dissolve(source, int(targets[at]), float(saves[at]), float(end[at]))
    return best


def carry_out(board: Board, move: Dissolve, recompute_s: float, confidence: float) -> None:
    """Moves the samples on the board."""
    for rows in (board.sequences, board.context):
        rows[move.target] += rows[move.source]
        rows[move.source] = 0.0
    board.ready_s[move.target] += recompute_s
    board.count[move.target] += board.count[move.source]
    board.count[move.source] = 0
    board.hold_s[move.source] = board.end_s[move.source] = 0.0
    board.judge(np.array([move.target]), confidence)


def _last_without(board: Board, source: int, targets: Ints) -> Floats:
    """[targets]: when all have ended but the source and each target."""
    ends = board.end_s.copy()
    ends[source] = 0.0
    order = np.argsort(ends)[::-1]
    return np.where(targets == order[0], ends[order[1]], ends[order[0]])


def _fits(board: Board, source: int, targets: Ints) -> np.ndarray:
    count = board.count[targets] + board.count[source] <= board.engines.most[targets]
    tokens = (board.context[targets] + board.context[source]).max(axis=1)
    return np.asarray(count & (tokens <= KV_SHARE * board.engines.kv_tokens[targets]))
