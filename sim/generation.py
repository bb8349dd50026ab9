"""Drawing the samples of one step on a fleet, with a policy at the wheel.

Between two events every engine runs for itself, in closed form; an event is something that happens to an actor, or a
beat every `beat_s`, the interval at which the live fleet reports. At each one all engines are brought to its time, then
the policy is asked. A sample is at exactly one place until it ends, and that is checked.

Prefill actors (`EngineShape.prefill_only`) run before the others in each interval: what they finish goes, with its KV,
to the decoding place with the fewest samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.records import ReplicaState, Work
from rlhfless.sim.engine import Engine
from rlhfless.sim.fleet import Actor, Fleet, Interrupted, Loaded
from rlhfless.sim.kernel import Ints
from rlhfless.sim.policy import Action, Assign, Beat, Event, Lost, Move, PlaceView, Policy, Release, Serving, Start
from rlhfless.sim.samples import Progress, RolloutBatch

NOBODY = -1
"""The place of a sample that has ended, or was lost."""


IDLE_BEATS = 1000
"""Beats without any work or start under way, after which a policy is not waited for any longer."""


class SimulationError(RuntimeError):
    """A plan or policy that cannot work: it forgets samples, or leaves nobody to draw them. Names which."""


@dataclass(frozen=True, slots=True)
class Links:
    """What moves between actors, and what it costs."""

    beat_s: float
    move_s: float
    """From one actor to another: tokens alone travel."""
    kv_bytes_per_token: int
    kv_bandwidth_bytes_per_s: float

    def kv_s(self, tokens: Ints) -> np.ndarray:
        """`[samples]`: seconds until the KV of so many tokens is with another actor."""
        moved: np.ndarray = self.move_s + tokens * (self.kv_bytes_per_token / self.kv_bandwidth_bytes_per_s)
        return moved


class Generation:
    """One step's generation, from the plan to the last response."""

    def __init__(self, fleet: Fleet, batch: RolloutBatch, policy: Policy, links: Links) -> None:
        self.progress = Progress(batch)
        self.actor_of: Ints = np.full(batch.samples, NOBODY, dtype=np.int64)
        """`[samples]`: the place that drew the end of each."""
        self._fleet = fleet
        self._policy = policy
        self._links = links
        self._home: Ints = np.full(batch.samples, NOBODY, dtype=np.int64)
        self._waiting: dict[int, list[Ints]] = {}
        self._unfinished = batch.samples
        self.preemptions = 0
        """Of engines that are through."""

    def run(self, plan: Mapping[int, Ints], at_s: float, interrupted: Sequence[int] = ()) -> float:
        """Draws everything. `plan` gives each place its samples; `interrupted` are places that have lost their actor
        since the last step. Returns when the last response ended.

        Raises SimulationError for a plan or a decision that leaves samples without a place, or places without actors.
        """
        for place, samples in plan.items():
            self._assign(place, samples, at_s)
        self._check("the plan")
        for place in interrupted:
            self._ask(Lost(place, self._forsake(place)), at_s)
        now_s, idle_beats = at_s, 0
        while True:
            due_s = self._fleet.agenda.next_s
            stuck = math.isinf(due_s) and not any(engine.running + engine.waiting for _, engine in self._engines())
            idle_beats = idle_beats + 1 if stuck else 0
            if idle_beats > IDLE_BEATS:
                raise SimulationError(f"{self._unfinished} samples are left, and no actor serves or will; Start one")
            now_s = max(now_s, min(due_s, now_s + self._links.beat_s))
            self._advance(now_s)
            if self._unfinished == 0:
                break
            event = self._happen() if due_s <= now_s else Beat()
            if event is not None:
                self._ask(event, now_s)
        for place, engine in self._engines():
            self._bill(self._fleet.actors[place], engine)
        return float(self.progress.table.finish_s.max(initial=at_s))

    def _engines(self, prefill_only: bool | None = None) -> Iterator[tuple[int, Engine]]:
        for place in self._fleet.actors:
            engine = self._engine_of(place)
            if engine is not None and prefill_only in (None, engine.shape.prefill_only):
                yield place, engine

    def _engine_of(self, place: int) -> Engine | None:
        """The engine of a place, if it has one for this step."""
        actor = self._fleet.actors.get(place)
        engine = actor.engine if actor is not None else None
        return engine if engine is not None and engine.progress is self.progress else None

    def _happen(self) -> Event | None:
        """Takes the next event off the agenda. None if it concerns the fleet alone."""
        at_s, event = self._fleet.agenda.pop()
        actor = self._fleet.actors.get(event.place)
        engine = self._engine_of(event.place)
        if isinstance(event, Interrupted) and engine is not None:
            at_s = max(at_s, engine.now_s)  # a Move may have waited for the end of an iteration
        if actor is None or not self._fleet.happen(at_s, event):
            return None
        if isinstance(event, Interrupted):
            if engine is not None:
                self._ended(event.place, engine.crash(at_s)[0])
                self._bill(actor, engine)
            return Lost(event.place, self._forsake(event.place))
        if isinstance(event, Loaded):
            for samples in self._waiting.pop(event.place, []):
                self._fleet.engine(event.place, self.progress, at_s).submit(samples, at_s)
            return Serving(event.place)
        return None

    def _forsake(self, place: int) -> Ints:
        """What was at the place becomes nobody's."""
        self._waiting.pop(place, None)
        lost = np.flatnonzero(self._home == place)
        self._home[lost] = NOBODY
        return lost

    def _advance(self, now_s: float) -> None:
        prefilled = [self._ended(place, engine.advance(now_s)) for place, engine in self._engines(prefill_only=True)]
        if prefilled:
            self._hand_over(np.concatenate(prefilled))
        for place, engine in self._engines(prefill_only=False):
            self._ended(place, engine.advance(now_s))

    def _ended(self, place: int, ended: Ints) -> Ints:
        """Counts what is complete. Returns what has only ended its prefill."""
        complete = self.progress.table.tokens[ended] == self.progress.table.target[ended]
        self._unfinished -= int(np.count_nonzero(complete))
        self._home[ended] = NOBODY
        self.actor_of[ended] = place
        over: Ints = ended[~complete]
        return over

    def _hand_over(self, samples: Ints) -> None:
        """Sends prefilled samples, with their KV, to the decoding places in turn."""
        table = self.progress.table
        arrival_s = table.finish_s[samples] + self._links.kv_s(table.prompt[samples])
        targets = [(engine.running + engine.waiting, place) for place, engine in self._decoders()]
        if len(samples) and not targets:
            raise SimulationError(f"{len(samples)} samples are prefilled, and no decoding actor serves; Start one")
        order = [place for _, place in sorted(targets)]
        for turn, i in enumerate(np.argsort(arrival_s, kind="stable")):
            place, sample = order[turn % len(order)], samples[i : i + 1]
            table.has_kv[sample] = True
            table.finish_s[sample] = np.nan
            self._home[sample] = place
            self._fleet.engine(place, self.progress, float(arrival_s[i])).submit(sample, float(arrival_s[i]))

    def _decoders(self) -> list[tuple[int, Engine]]:
        return [
            (place, self._fleet.engine(place, self.progress, 0.0))
            for place, actor in self._fleet.actors.items()
            if actor.life.state is ReplicaState.SERVING and not self._fleet.places[place].shape.prefill_only
        ]

    def _ask(self, event: Event, now_s: float) -> None:
        views = {place: self._view(place) for place in range(len(self._fleet.places))}
        for action in self._policy.decide(now_s, event, views):
            self._carry_out(action, now_s)
        if isinstance(event, Lost):
            self._check("the policy")

    def _view(self, place: int) -> PlaceView:
        actor = self._fleet.actors.get(place)
        if actor is None:
            return PlaceView(None, 0, 0, self._home, place)
        waiting = sum(len(samples) for samples in self._waiting.get(place, []))
        engine = self._engine_of(place)
        if engine is None:
            return PlaceView(actor.life.state, 0, waiting, self._home, place)
        return PlaceView(actor.life.state, engine.running, engine.waiting + waiting, self._home, place)

    def _carry_out(self, action: Action, now_s: float) -> None:
        if isinstance(action, Assign):
            self._assign(action.place, action.samples, now_s)
        elif isinstance(action, Move):
            self._move(action, now_s)
        elif isinstance(action, Start):
            self._fleet.start(action.place, now_s)
        else:
            self._release(action, now_s)

    def _assign(self, place: int, samples: Ints, at_s: float) -> None:
        if np.any(self._home[samples] != NOBODY) or np.any(self.progress.finished[samples]):
            raise SimulationError(f"samples given to place {place} have ended, or belong to another; Move them")
        self._home[samples] = place
        actor = self._fleet.actors.get(place)
        if actor is not None and actor.life.state is ReplicaState.SERVING:
            self._fleet.engine(place, self.progress, at_s).submit(samples, at_s)
        else:
            self._waiting.setdefault(place, []).append(samples)

    def _move(self, move: Move, now_s: float) -> None:
        leave_s = now_s
        engine = self._engine_of(move.source)
        if engine is not None:
            leave_s, ended = engine.abort(move.samples, now_s)
            self._hand_over(self._ended(move.source, ended))
        waiting = self._waiting.get(move.source, [])
        self._waiting[move.source] = [np.setdiff1d(samples, move.samples) for samples in waiting]
        moved = move.samples[self._home[move.samples] == move.source]
        self._home[moved] = NOBODY
        self._assign(move.target, moved, leave_s + self._links.move_s)

    def _release(self, release: Release, now_s: float) -> None:
        left = int(np.count_nonzero(self._home == release.place))
        if left:
            raise SimulationError(f"place {release.place} is released with {left} samples; Move them first")
        engine = self._engine_of(release.place)
        if engine is not None:
            self._bill(self._fleet.actors[release.place], engine)
            now_s = max(now_s, engine.now_s)
        self._fleet.release(release.place, now_s, release.tier)

    def _check(self, culprit: str) -> None:
        """Nobody is forgotten."""
        forgotten = np.flatnonzero((self._home == NOBODY) & ~self.progress.finished)
        if len(forgotten):
            raise SimulationError(f"{culprit} leaves {len(forgotten)} samples without a place, such as {forgotten[0]}")

    def _bill(self, actor: Actor, engine: Engine) -> None:
        """One call per time of work; the last one carries the tokens."""
        step = self.progress.batch.step
        self.preemptions += engine.preemptions
        periods = engine.periods
        for number, (start_s, end_s) in enumerate(periods, 1):
            figures: dict[str, int] = {}
            if number == len(periods):
                figures = {
                    "input_tokens": engine.prefilled_tokens,
                    "output_tokens": engine.decoded_tokens,
                    "cached_tokens": engine.cached_tokens,
                }
            actor.called(Work.GENERATE, step, start_s, end_s, **figures)
