"""Samples on their way from one actor to another: what that takes, and the actions for it. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rlhfless.records import Decision
from rlhfless.scaling.policies.crew import Inputs, Moment, asleep_or_absent, make_way, start
from rlhfless.scaling.policies.forecasters import Floats
from rlhfless.scaling.policies.migration import Aim, Board, Part, Transfer
from rlhfless.scaling.policies.outlook import FEW, Rows, alive
from rlhfless.scaling.policy import Action, Flags, Ints, Move, Note


def part_of(rows: Rows, chosen: Ints, board: Board) -> Part:
    """Some of an actor's rows as the outlook counts them, on the board's grid; where they come to, none of them
    waits."""
    home = rows.home[chosen[:1]]
    few, most = board.count[home] <= FEW, board.engines.most[home]  # as they were counted on the board

    def counted(some: Ints, slots: Ints) -> Floats:
        here = replace(rows.of(some), home=np.zeros(some.size, np.int64))
        return alive(here, 1, slots, few, board.grid).columns

    columns = counted(np.sort(chosen), np.array([chosen.size]))
    if (board.count[home] <= most).all():
        return Part(columns, columns, chosen.size)
    left = np.setdiff1d(np.flatnonzero(rows.home == home), chosen)
    return Part(columns, board.columns[:, home] - counted(left, most), chosen.size)


class Recompute:
    """What it takes to have the KV of a place's samples elsewhere: computed again, or moved, whichever is sooner."""

    def __init__(self, now: Moment, rows: Rows) -> None:
        home, context = rows.home[rows.begun], rows.context[rows.begun]
        count = np.bincount(home, minlength=now.places)
        mean = np.bincount(home, context, minlength=now.places) / np.maximum(count, 1)
        again_s, moved_s = np.zeros(now.places), np.full(now.places, math.inf)
        for place in np.flatnonzero(count).tolist():
            engine = now.layout.rooms[place].engine
            assert engine is not None  # samples are at places for generation
            again_s[place] = engine.model.prefill_s(int(mean[place])) * count[place]
        if math.isfinite(now.view.fleet.kv_token_s):
            moved_s = mean * now.view.fleet.kv_token_s
        self.seconds: Floats = now.view.fleet.move_s + np.minimum(again_s, moved_s)
        """[places]: all samples of a place one after the other, or their KV side by side."""
        self.with_kv: Flags = moved_s < again_s
        """[places]: whether it is moved."""


def moves(now: Moment, rows: Rows, again: Recompute) -> list[Action]:
    """From where samples are to where `rows` have them now; whoever takes some and is not there is started."""
    view, before = now.view, now.view.home[rows.ahead.samples]
    moved = np.flatnonzero(before != rows.home)
    sources, targets = before[moved], rows.home[moved]
    absent = [place for place in np.unique(targets).tolist() if asleep_or_absent(view.places[place])]
    actions = [*make_way(view, now.layout, absent), *start(view, absent)]
    pair = sources * now.places + targets
    for source, target in (divmod(code, now.places) for code in np.unique(pair).tolist()):
        samples = rows.ahead.samples[moved[pair == source * now.places + target]]
        actions.append(Move(source, target, samples, bool(again.with_kv[source])))
    return actions


def note(now: Moment, move: Transfer, why: str, aim: Aim) -> Note:
    """The decision, and what it was made from."""
    inputs: Inputs = {"why": why, "saves_usd": move.saves_usd, "end_s": move.end_s, "confidence": aim.confidence}
    if math.isfinite(aim.limit_s):
        inputs["limit_s"] = aim.limit_s
    return Note(Decision(now.view.step, now.at_s, "migrate", f"place {move.source} to {move.target}", inputs))
