"""Migration by value: actors are dissolved into others, or relieved, where that is worth more than it costs. Pure.

    dissolve   all samples of an actor go to another one. It saves what the actor would still have cost, and costs
               what the other one takes longer: more sequences in a batch, and the KV of those that came, computed
               again or moved. It is done if it saves more than `LEAST_GAIN` of what it gives up, and ends in time.
    relieve    of the actor that ends last, the half that is expected to end first goes to another one, that has
               little left or is started for it. It is done while the actor would end too late, or where the time it
               saves is worth more than it costs.

All is judged by the outlook: rows of expected sequences and contexts, which add up (`outlook`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.policies import kernel
from rlhfless.scaling.policies.counting import SEQUENCES
from rlhfless.scaling.policies.forecasters import Floats
from rlhfless.scaling.policies.kernel import Actors, Outlook
from rlhfless.scaling.policies.outlook import Alive, Engines
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
    caution: float
    """With which one must end in time that takes the samples of another: no less."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of an actor, as the outlook counts them."""

    columns: Floats  # [3, 1, T]: where they come to, with a slot for each
    freed: Floats
    """[3, 1, T]: what the actor that they leave has less to do. Not the same where samples wait: others get their slots
    sooner."""
    count: int


class Board:
    """The actors of a step and what they have still to do. Columns [3, places, T] change as samples are moved on it."""

    def __init__(
        self, engines: Engines, pace: Floats, state: Alive, ready_s: Floats, freed_usd_per_s: Floats, count: Ints
    ) -> None:
        """It takes over the columns of `state`. `pace`: how much slower than its model an engine was measured;
        `ready_s`: until an actor works; `freed_usd_per_s`: what each second less of it saves; `count`: its samples.
        All [places]."""
        self.engines = engines
        self.grid = state.grid
        self.columns = state.columns
        self.ready_s = ready_s.copy()
        self.freed = freed_usd_per_s
        self.count = count.copy()
        self.hold_s = np.zeros(ready_s.size)
        """Until it has nothing left to do, as expected."""
        self.end_s = np.zeros(ready_s.size)
        """Until it has, with the confidence of the aim."""
        self.outlook = Outlook(engines.speeds, pace, state.grid, self.columns)
        self._nothing = np.zeros((3, 1, state.grid.size))

    def judge(self, places: Ints, confidence: float) -> None:
        """Brings `hold_s` and `end_s` of places up to date."""
        self.hold_s[places], self.end_s[places] = self.trial(places, self._nothing, 0.0, confidence)

    @property
    def actors(self) -> Actors:
        """The board's own arrays."""
        return Actors(self.count, self.engines.kv_tokens, self.freed, self.ready_s, self.hold_s, self.end_s)

    def take(self, source: int, target: int, part: Part | None) -> None:
        """Gives samples of one actor, all of them if None, to another, without judging either."""
        moved = self.columns[:, source].copy() if part is None else part.columns[:, 0]
        freed = moved if part is None else part.freed[:, 0]
        count = self.count[source] if part is None else part.count
        self.columns[:, target] += moved
        self.columns[:, source] = np.maximum(self.columns[:, source] - freed, 0.0)
        self.count[target] += count
        self.count[source] -= count

    def trial(self, places: Ints, more: Floats, delay_s: float | Floats, *confidences: float) -> Floats:
        """`hold_s`, and `end_s` with each confidence, [1 + confidences, rows] of actors with so much `more` (or less)
        to do [3, 1, T], after a delay."""
        out = np.empty((places.size, 1 + len(confidences)))
        kernel.trial(self.outlook, places, more, -np.log(confidences), out)
        return np.asarray(out.T + (self.ready_s[places] + delay_s))

    def chance(self, limit_s: float) -> float:
        """The probability that all have ended by then."""
        places = np.flatnonzero(self.count)
        within_s, nobody = limit_s - self.ready_s[places], np.empty(places.size)
        kernel.nobody_within(self.outlook, places, within_s, nobody)
        return float(np.exp(-nobody.sum())) if (within_s >= 0).all() else 0.0

    def iteration_s(self, places: Ints) -> Floats:
        """[rows]: what an iteration takes now at `places` [rows], by the models."""
        out = np.empty(places.size)
        kernel.iterations_s(self.outlook, places, out)
        return out

    @property
    def last_s(self) -> float:
        """When all have ended."""
        return float(self.end_s.max())


@dataclass(frozen=True, slots=True)
class Transfer:
    """Samples of one actor to another."""

    source: int
    target: int
    saves_usd: float
    """Time counted as money."""
    end_s: float
    """Of the later one of the two, then."""
    part: Part | None = None
    """What is moved; all of it if None."""


def dissolve(board: Board, aim: Aim, sources: Ints, able: Ints, recompute_s: Floats) -> Transfer | None:
    """The one of `sources` whose samples are best moved to another actor, or None. The board is left as it is.

    `able`: places that serve. `recompute_s` [places]: to compute the KV of a place's samples again elsewhere, or to
    move it.
    """
    working, takers = sources[board.count[sources] > 0], able[board.count[able] > 0]
    fewest = working[np.argsort(board.columns[SEQUENCES, working, 0], kind="stable")][:SOURCES]
    # Two actors that each end in time with probability p both do with p^2: so much is asked of one for both.
    limits = -2 * np.log((aim.confidence, aim.caution))
    asked = aim.limit_s, board.last_s, aim.time_usd_per_s, LEAST_GAIN, KV_SHARE
    found = kernel.best_dissolved(board.outlook, board.actors, fewest, takers, recompute_s, limits, asked, np.empty(3))
    source, target, usd, end_s = found
    return None if source < 0 else Transfer(source, target, usd, end_s)


def may_relieve(board: Board, aim: Aim) -> bool:
    """Whether it can help at all to move samples off the actor that ends last. In time already, it would have to save
    time, and of that no more than there is between the last end and the one before."""
    if board.last_s > aim.limit_s:
        return True
    before_s = float(np.partition(board.end_s, -2)[-2]) if board.end_s.size > 1 else 0.0
    return aim.time_usd_per_s > 0 and board.last_s - before_s > LEAST_GAIN * board.last_s


def relieve(board: Board, aim: Aim, part: Part, targets: Ints, wait_s: Floats) -> Transfer | None:
    """Where `part` of the actor that ends last is best moved, or None if that does not help. The board stays as it is.

    `wait_s` [targets]: until the samples can go on there, on top of what the board knows.
    """
    source = int(np.argmax(board.end_s))
    targets, wait_s = targets[targets != source], wait_s[targets != source]
    if not targets.size:
        return None
    one = np.array([source])
    left_hold_s, left_end = board.trial(one, -part.freed, 0.0, aim.confidence)
    hold_s, end = board.trial(targets, part.columns, wait_s, aim.confidence)
    ends = np.maximum(end, left_end)
    costs = board.freed[targets] * (hold_s - board.hold_s[targets])
    costs += board.freed[source] * (left_hold_s - board.hold_s[source])
    late = board.last_s > aim.limit_s
    # Too late, every actor counts: where several end last, relieving one of them does not help the step yet.
    others = 0.0 if late else _last_without(board, one, targets)
    gained_s = board.last_s - np.maximum(ends, others)
    saves = aim.time_usd_per_s * gained_s - costs
    fits = board.count[targets] + part.count <= board.engines.most[targets]
    allowed = fits & (gained_s > LEAST_GAIN * board.last_s) & (late | (saves > LEAST_GAIN * np.abs(costs)))
    if not allowed.any():
        return None
    # In time if that can be, and then for the least; else as early as can be.
    short_s = np.maximum(ends - aim.limit_s, 0.0) if late else np.zeros(ends.size)
    at = int(np.lexsort((-saves, short_s, ~allowed))[0])
    return Transfer(source, int(targets[at]), float(saves[at]), float(ends[at]), part)


def carry_out(board: Board, move: Transfer, recompute_s: float, confidence: float) -> None:
    """Moves the samples on the board."""
    source, target = move.source, move.target
    board.take(source, target, move.part)
    board.ready_s[target] += recompute_s
    board.hold_s[source] = board.end_s[source] = 0.0
    board.judge(np.array([target] if move.part is None else [source, target]), confidence)


def each(confidence: float, board: Board) -> float:
    """The confidence to ask of each actor, so that all of them end in time with the one that is given."""
    return float(confidence ** (1 / max(int(np.count_nonzero(board.count)), 1)))


def _last_without(board: Board, source: Ints, target: Ints) -> Floats:
    """[pairs]: when all have ended but a source and its target."""
    last = np.zeros(target.size)
    for place in np.argsort(board.end_s)[-3:]:  # one of the last three is neither
        last = np.where((place != source) & (place != target), board.end_s[place], last)
    return last
