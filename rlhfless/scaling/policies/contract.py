"""Contracts: the goals of a step's plan.

The contract of a run (`RunContract`) may cover all its steps together; `contract_for_step` computes a step's share of
the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.spec import CheapestSpec, ContractSpec, FastestSpec, WeightedSpec


@dataclass(frozen=True, slots=True)
class RunContract:
    """The contract of a run, for its policy."""

    contract: ContractSpec = WeightedSpec()  # noqa: RUF009 (frozen)
    """The contract of the spec."""
    steps: int = 1  # Steps of the whole run; a contract per run is divided among them
    step_contracts: tuple[ContractSpec, ...] = ()
    """One contract per step if they differ; `contract` applies to the steps after the last of these."""
    span: int | None = None
    """Number of steps that a limit `per: run` covers, counted from step 0: an epoch, for example. The whole run if
    None."""

    def of_step(self, step: int) -> ContractSpec:
        """Return the contract of the step with this number in the run, counted from 0."""
        return self.step_contracts[step] if step < len(self.step_contracts) else self.contract

    def opens(self, step: int) -> bool:
        """Return whether the time and cost of a limit `per: run` are counted from this step on."""
        return step % self._span == 0

    def steps_left(self, step: int) -> int:
        """Return the number of steps, including this one, that share its limit; at least 1."""
        end = min((step // self._span + 1) * self._span, self.steps)
        return max(end - step, 1)

    @property
    def _span(self) -> int:
        return max(self.steps, 1) if self.span is None else self.span


@dataclass(frozen=True, slots=True)
class CheapestUnderDeadline:
    """Contract: the least cost of a step's generation that ends within `deadline_s` of the step's start."""

    deadline_s: float

    def __str__(self) -> str:
        return f"cheapest within {self.deadline_s:.6g} s"


@dataclass(frozen=True, slots=True)
class FastestUnderBudget:
    """Contract: the earliest end of a step's generation that costs at most `budget_usd`."""

    budget_usd: float

    def __str__(self) -> str:
        return f"fastest for at most {self.budget_usd:.6g} USD"


@dataclass(frozen=True, slots=True)
class Weighted:
    """Contract: the least `time_weight x time / T0 + (1 - time_weight) x cost / C0`.

    T0 is the time of this step's fastest plan and C0 the cost of its cheapest, so a weight means the same for every
    workload: at 0.5, one percent above the least time weighs the same as one percent above the least cost.
    """

    time_weight: float

    def __str__(self) -> str:
        return f"time weighted {self.time_weight:.6g}, cost {1 - self.time_weight:.6g}"


Contract = CheapestUnderDeadline | FastestUnderBudget | Weighted


def contract_for_step(
    spec: ContractSpec,
    *,
    steps_left: int,
    spent_s: float = 0.0,
    spent_usd: float = 0.0,
    other_s: float = 0.0,
    other_usd: float = 0.0,
) -> Contract:
    """Return the step's share of the contract: an equal part of the rest for each of `steps_left` steps.

    `spent_s` and `spent_usd` are the time and cost of the run so far; `other_s` and `other_usd` are the time and cost
    of a step outside generation. Both are subtracted, for a contract per step as for one per run. If nothing is left,
    the contract is infeasible, and the plan reports that.

    Raises ValueError for `steps_left` below 1.
    """
    if steps_left < 1:
        raise ValueError(f"steps_left is {steps_left}; there must be a step to plan")
    if isinstance(spec, CheapestSpec):
        whole_s = (spec.deadline_s - spent_s) / steps_left if spec.per == "run" else spec.deadline_s
        return CheapestUnderDeadline(max(whole_s - other_s, 0.0))
    if isinstance(spec, FastestSpec):
        whole_usd = (spec.budget_usd - spent_usd) / steps_left if spec.per == "run" else spec.budget_usd
        return FastestUnderBudget(max(whole_usd - other_usd, 0.0))
    return Weighted(spec.time_weight)


def keeps(contract: ContractSpec, seconds: float, usd: float, limit: float | None) -> bool | None:
    """Return whether steps that took `seconds` and `usd` in total keep their `limit`, or None without a limit.

    Simulations, plans and comparisons all use this rule.
    """
    if limit is None or isinstance(contract, WeightedSpec):
        return None
    return (seconds if isinstance(contract, CheapestSpec) else usd) <= limit


def best_of(figures: Sequence[tuple[float, float]], contract: ContractSpec, limit: float | None) -> int:
    """Return the index of the figures that meet a contract best, the first of ties. See `order_of`."""
    return order_of(figures, contract, limit)[0]


def order_of(figures: Sequence[tuple[float, float]], contract: ContractSpec, limit: float | None) -> list[int]:
    """Return the indices of figures (seconds, US dollars) of the same steps, best by the contract first, ties in order.

    `limit` is the contract's limit for these steps together, or None. Figures that violate it come after those that
    keep it, nearest first.
    """
    if not figures:
        return []
    least_s, least_usd = (min(one) or 1.0 for one in zip(*figures, strict=True))  # 1.0 for devices that cost nothing

    def key(index: int) -> tuple[bool, float]:
        seconds, usd = figures[index]
        if isinstance(contract, WeightedSpec):
            return False, contract.time_weight * seconds / least_s + (1 - contract.time_weight) * usd / least_usd
        limited, other = (seconds, usd) if isinstance(contract, CheapestSpec) else (usd, seconds)
        kept = keeps(contract, seconds, usd, limit) is not False
        return not kept, other if kept else limited

    return sorted(range(len(figures)), key=key)
