"""The plan of a step: its actors with their samples, its predicted time and cost, and the reason for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlhfless.records import Decision
from rlhfless.scaling.plan.contract import CheapestUnderDeadline, Contract, FastestUnderBudget
from rlhfless.scaling.plan.responses import Ints


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """The work of one actor."""

    kind: str
    tier: str
    samples: Ints
    """Indices into the responses, from the longest to the shortest: the order in which they go to the engine."""
    ready_s: float
    """From the start of the step until it can work: its wait, and the load of the new weights."""
    finish_s: float
    """From the start of the step until its last sample ends. It is paid for until then, and can be released then."""
    usd: float
    """Until then, and between this step and the next."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The actors of a step and their work, its predicted time and cost, and the reason."""

    contract: Contract
    feasible: bool
    """Whether the contract can be kept; where not, the plan is the fastest, or the one with the least cost in all."""
    actors: tuple[ActorPlan, ...]
    """The actors with the longest samples come first."""
    step_s: float
    """When the last actor ends."""
    usd: float
    """Cost of all actors, each until its own end, and of having them between this step and the next."""
    waiting_usd: float
    """Cost of what waits for them until the last one ends."""
    reason: str
    time_usd_per_s: float
    """The value of a second of the step: 0 under a deadline; by the weights; under a budget, the saving of a slower
    plan, and infinite if the budget is not spent."""

    @property
    def nearest(self) -> Contract:
        """The nearest contract that can be kept: `contract` itself if that can."""
        if self.feasible:
            return self.contract
        is_deadline = isinstance(self.contract, CheapestUnderDeadline)
        return CheapestUnderDeadline(self.step_s) if is_deadline else FastestUnderBudget(self.usd + self.waiting_usd)

    def record(self, step: int, at_s: float) -> Decision:
        """The decision as the trace keeps it."""
        inputs: dict[str, float | int | str | bool] = {
            "contract": str(self.contract),
            "feasible": self.feasible,
            "nearest": str(self.nearest),
            "samples": sum(actor.samples.size for actor in self.actors),
            "step_s": self.step_s,
            "usd": self.usd,
            "waiting_usd": self.waiting_usd,
            "reason": self.reason,
        }
        inputs |= {f"actors_{kind}": n for kind, n in sorted(Counter(a.kind for a in self.actors).items())}
        return Decision(step, at_s, "plan", f"{len(self.actors)} actors", inputs)
