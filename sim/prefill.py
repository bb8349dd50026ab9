"""The actors of a simulated step that compute prompts for those that draw: which of them computes what, and when.

As rlhfless.orchestrator.prefill has it of real ones: a piece goes at once to the actor that would have computed the
fewest tokens before it is done, and each actor computes first what was asked for first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.records import ReplicaState, Work
from rlhfless.sim.fleet import SimulatedFleet
from rlhfless.sim.kernel_state import Ints
from rlhfless.sim.samples import StepProgress


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples that an actor gets together with the KV of their prompts."""

    slot: int
    """The actor that draws them."""
    samples: Ints
    prompts: tuple[int, ...]
    """Those whose KV it has not asked for before."""
    asked_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompts of a piece, computed."""

    by: int
    """The slot of the prefill actor."""
    start_s: float
    end_s: float
    sequences: int
    tokens: int
    new_tokens: int
    """Of these tokens, those that were not in its cache."""


class SimulatedPrefill:
    """The prefill actors of a fleet, and what each has computed of a step's prompts."""

    def __init__(self, fleet: SimulatedFleet, progress: StepProgress) -> None:
        self._fleet = fleet
        self._progress = progress
        self._known: dict[tuple[int, int], set[int]] = {}
        """By slot and life: the prompts and shared prefixes that the actor has computed."""
        self._queue: dict[tuple[int, int], list[tuple[float, int]]] = {}
        """By slot and life: when each piece that it was asked for is done, and its tokens."""

    @property
    def serving(self) -> list[int]:
        """Slots whose actors have the step's weights."""
        return [slot for slot in self._fleet.setup.prefill if self._fleet.state(slot) is ReplicaState.SERVING]

    @property
    def loading(self) -> bool:
        """Whether an actor is up and will have the weights."""
        return any(self._fleet.state(slot) is ReplicaState.STALE for slot in self._fleet.setup.prefill)

    def compute(self, prompts: Sequence[int], at_s: float) -> Computed | None:
        """Have the prompts computed; None if no actor serves."""
        slot = min(self.serving, key=lambda slot: self._left(slot, at_s) + self._new(slot, prompts)[1], default=None)
        if slot is None:
            return None
        nodes, new_tokens = self._new(slot, prompts)
        actor, replica, depth = self._fleet.setup.actors[slot], self._fleet.replicas[slot], self._progress.table.depth
        start_s = max(at_s, replica.busy_s)
        seconds = sum(actor.prices.model.prefill_s(tokens, int(depth[node]) - tokens) for node, tokens in nodes.items())
        replica.busy_s = end_s = start_s + seconds * actor.slowdown
        self._of(slot).update(nodes)
        self._queue.setdefault((slot, replica.number), []).append((end_s, new_tokens))
        return Computed(slot, start_s, end_s, len(prompts), int(depth[list(prompts)].sum()), new_tokens)

    def bill(self, done: Computed) -> None:
        """Record the call in which a piece was computed."""
        self._fleet.replicas[done.by].called(
            Work.PRECOMPUTE,
            self._progress.batch.step,
            done.start_s,
            done.end_s,
            input_tokens=done.tokens,
            cached_tokens=done.tokens - done.new_tokens,
            sequences=done.sequences,
        )

    def _new(self, slot: int, prompts: Sequence[int]) -> tuple[dict[int, int], int]:
        """The prompts and prefixes that an actor would have to compute, with the tokens of each; and all these."""
        known, table, nodes = self._of(slot), self._progress.table, dict[int, int]()
        for prompt in prompts:
            for node in self._progress.lineage(prompt):
                if node not in known and node not in nodes:
                    above = table.parent[node]
                    nodes[node] = int(table.depth[node] - (table.depth[above] if above >= 0 else 0))
        return nodes, sum(nodes.values())

    def _left(self, slot: int, at_s: float) -> int:
        queue = self._queue.get((slot, self._fleet.replicas[slot].number), ())
        return sum(tokens for end_s, tokens in queue if end_s > at_s)

    def _of(self, slot: int) -> set[int]:
        return self._known.setdefault((slot, self._fleet.replicas[slot].number), set())
