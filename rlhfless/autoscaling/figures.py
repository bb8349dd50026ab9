"""The interface of a run's ledger for its scaler: figures to decide by, and a record of decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.records import Decision, Invocation
from rlhfless.records.traces import TracedRollout
from rlhfless.scaling.prices import PriceBook


class FleetFigures(Protocol):
    """The ledger of a run (rlhfless.loop.ledger), as scaling uses it."""

    prices: PriceBook

    def mean_start_s(self, function: str) -> float | None:
        """Mean duration of the function's cold starts, with the proof of an engine's loads; None if there was none."""

    def mean_start_phases(self) -> dict[str, float]:
        """The mean seconds of each phase of the engines' starts, by StartPhase; empty if there was no start."""

    def mean_load_s(self) -> float:
        """Mean duration of an actor's recent weight loads; 0 if there was none."""

    def reacquire_s(self, kind: str) -> float:
        """Expected time until devices of a kind are there whose node has to come; not billed."""

    def cost_usd(self, pools: Iterable[ReplicaPool]) -> float:
        """Cost of the run up to now, with the holdings of these pools that are still open."""

    def has_rollouts_of(self, step: int) -> bool:
        """Whether the step's rollouts are in the trace: then it was interrupted later, and is done again."""

    def done_in_step(self, step: int) -> tuple[tuple[Invocation, ...], tuple[TracedRollout, ...]]:
        """The calls of a step in progress, and its rollouts that are in the ledger."""

    def add_decision(self, decision: Decision) -> None:
        """Add a decision of the scaler, with its inputs."""
