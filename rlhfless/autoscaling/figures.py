"""What the ledger tells the scaler of a run, and keeps of its decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rlhfless.fleet.pool import Pool
from rlhfless.records import Decision, FunctionName, Invocation
from rlhfless.records.traces import TracedRollout
from rlhfless.scaling.prices import PriceBook


class FleetFigures(Protocol):
    """The ledger of a run (rlhfless.loop.ledger), as far as scaling needs it."""

    prices: PriceBook

    def mean_start_s(self, function: FunctionName) -> float | None:
        """How long the function's cold starts took; None if there was none."""

    def mean_load_s(self) -> float:
        """How long an actor's load of weights took, over the recent ones; 0 if there was none."""

    def cost_usd(self, pools: Iterable[Pool]) -> float:
        """Cost of the run up to now, with the holdings of these pools that are still open."""

    def has_rollouts_of(self, step: int) -> bool:
        """The step's rollouts are in the trace: it was interrupted after that, and is done again."""

    def done_in_step(self, step: int) -> tuple[tuple[Invocation, ...], tuple[TracedRollout, ...]]:
        """What was called for a step that is under way, and what it drew as far as it is in the ledger."""

    def add_decision(self, decision: Decision) -> None:
        """A decision of the scaler, with all it was decided from."""
