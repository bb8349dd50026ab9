"""The plan of one step's generation: how many actors, of which kind, from which tier, and which samples each one gets.

Pure and deterministic: the same responses, options and contract give the same plan. docs/plan.md describes
its inputs and decisions.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from rlhfless.records import Decision
from rlhfless.scaling.plan.contract import CheapestUnderDeadline, Contract, FastestUnderBudget
from rlhfless.scaling.plan.cost import GroupTimes
from rlhfless.scaling.plan.frontier import RESOLUTION, Frontier
from rlhfless.scaling.plan.groups import Partition
from rlhfless.scaling.plan.options import FleetOptions
from rlhfless.scaling.plan.responses import Floats, Ints, Responses

SLOWER = 1.1
"""A plan with so much more time is compared to say what time is worth; nearer plans may have the same actors."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """The actors of a step and their work, its predicted time and cost, and the reason."""

    contract: Contract
    """The contract that was asked for."""
    feasible: bool
    nearest: Contract
    """The nearest contract that can be kept, which the plan keeps; equal to `contract` if that is feasible."""
    actors: tuple[ActorPlan, ...]
    """The actors with the longest samples come first."""
    wake: dict[tuple[str, str], int]
    """The number of actors to wake or start, by kind and tier."""
    release: dict[str, int]
    """The number of warm actors without work in this step, by kind."""
    step_s: float
    """When the last actor ends."""
    usd: float
    """Cost of all actors, each until its own end."""
    split_prompts: int
    """Prompts whose siblings are on more than one actor."""
    reason: str
    time_usd_per_s: float
    """The value of a second of the step: 0 under a deadline; by the weights; under a budget, the saving of a slower
    plan, and infinite if the budget is not spent."""

    def record(self, step: int, at_s: float) -> Decision:
        """The decision as the trace keeps it."""
        inputs: dict[str, float | int | str | bool] = {
            "contract": str(self.contract),
            "feasible": self.feasible,
            "nearest": str(self.nearest),
            "samples": sum(actor.samples.size for actor in self.actors),
            "step_s": self.step_s,
            "usd": self.usd,
            "split_prompts": self.split_prompts,
            "wake": sum(self.wake.values()),
            "release": sum(self.release.values()),
            "reason": self.reason,
        }
        inputs |= {f"actors_{kind}": n for kind, n in sorted(Counter(a.kind for a in self.actors).items())}
        return Decision(step, at_s, "plan", f"{len(self.actors)} actors", inputs)


def plan(step: Responses, options: FleetOptions, contract: Contract, *, waiting_usd_per_s: float = 0.0) -> Plan:
    """Plans a step. An infeasible contract gives the plan of the nearest feasible one, and says so.

    `waiting_usd_per_s` is the cost of a second of the step in addition to its actors. Under a deadline the plan may
    therefore end before it; under weights it is added to the value of a second. A budget is for the actors alone.

    Raises CapacityError if one response alone exceeds the KV cache of a device on offer.
    """
    frontier = Frontier(step, options)
    chosen, why, time_usd_per_s = _choose(frontier, contract, waiting_usd_per_s)
    nearest = contract
    if chosen is None and isinstance(contract, CheapestUnderDeadline):
        chosen = frontier.fastest()
    elif chosen is None:
        chosen = frontier.cheapest()
    limit_s = chosen.step_s
    if isinstance(contract, CheapestUnderDeadline):
        limit_s = max(limit_s, contract.deadline_s if waiting_usd_per_s == 0 else 0.0)
    settled = frontier.settle(chosen, limit_s)
    actors = _actors(step, settled, frontier.lists)
    step_s, usd = max(actor.finish_s for actor in actors), math.fsum(actor.usd for actor in actors)
    if isinstance(contract, CheapestUnderDeadline) and step_s > contract.deadline_s:
        nearest = CheapestUnderDeadline(step_s)
        why = f"no plan on these devices ends before {step_s:.6g} s, the deadline is {contract.deadline_s:.6g} s"
    elif isinstance(contract, FastestUnderBudget) and usd > contract.budget_usd:
        nearest = FastestUnderBudget(usd)
        why = f"no plan on these devices costs less than {usd:.6g} USD, the budget is {contract.budget_usd:.6g} USD"
    wake, release = _tiers(actors, options)
    split = _split_prompts(step, actors)
    kept = nearest == contract
    return Plan(contract, kept, nearest, actors, wake, release, step_s, usd, split, why, time_usd_per_s)


def _choose(frontier: Frontier, contract: Contract, waiting_usd_per_s: float) -> tuple[Partition | None, str, float]:
    """The partition that the contract asks for, None if it cannot be kept, the reason in plain numbers, and the price
    of a second."""
    if isinstance(contract, CheapestUnderDeadline):
        chosen = frontier.under(contract.deadline_s)
        if chosen is not None and waiting_usd_per_s > 0:
            chosen = frontier.weighted(waiting_usd_per_s, chosen)
        return chosen, f"the cheapest that ends within {contract.deadline_s:.6g} s", waiting_usd_per_s
    cheap = frontier.cheapest()
    if isinstance(contract, FastestUnderBudget):
        chosen = frontier.fastest_for(contract.budget_usd)
        reason = f"the fastest for at most {contract.budget_usd:.6g} USD; the cheapest costs {cheap.usd:.6g} USD"
        return chosen, reason, math.inf if chosen is None else _time_usd_per_s(frontier, chosen)
    fast, weight = frontier.fastest(), contract.time_weight
    # Where devices cost nothing more while they are held, a plan can save nothing but time.
    only_time = weight == 1 or (cheap.usd == 0 and waiting_usd_per_s > 0)
    per_s = math.inf if only_time else weight / (1 - weight) * cheap.usd / fast.step_s + waiting_usd_per_s
    reason = (
        f"time weighs {weight:.6g} against the fastest plan ({fast.step_s:.6g} s, {fast.usd:.6g} USD) and cost "
        f"{1 - weight:.6g} against the cheapest ({cheap.step_s:.6g} s, {cheap.usd:.6g} USD)"
    )
    return frontier.weighted(per_s), reason, per_s


def _time_usd_per_s(frontier: Frontier, chosen: Partition) -> float:
    """The price of a second at a plan that spends its budget: the saving of the plan that may take `SLOWER` times as
    long, by the seconds it takes more. Infinite if the budget would pay for a faster plan, were there one."""
    if chosen.step_s <= frontier.fastest().step_s * RESOLUTION:
        return math.inf
    slower = frontier.under(chosen.step_s * SLOWER)
    if slower is None or slower.step_s <= chosen.step_s:
        return 0.0
    return max(chosen.usd - slower.usd, 0.0) / (slower.step_s - chosen.step_s)


def _actors(step: Responses, cut: Partition, lists: list[Ints]) -> tuple[ActorPlan, ...]:
    order = lists[cut.candidate.listed]
    work_s = [group.work_s for group in cut.groups]
    if len(lists) > 1:
        order, work_s = _drained(step, cut, order)
    return tuple(
        ActorPlan(
            group.tier.device.kind,
            group.tier.standby.tier,
            order[group.begin : group.end][::-1].copy(),
            group.tier.ready_s,
            group.tier.ready_s + work,
            (group.tier.ready_s + work) * group.tier.device.usd_per_s,
        )
        for group, work in zip(cut.groups, work_s, strict=True)
    )


def _drained(step: Responses, cut: Partition, order: Ints) -> tuple[Ints, list[float]]:
    """The groups' exact times where siblings differ in length, and the list with each group sorted by length.

    The cuts assume that a group's samples end in the order of the list, and that siblings that are not adjacent
    prefill their prompt twice. So the exact time is never longer than the assumed time.
    """
    actor = np.empty(order.size, np.int64)
    for index, group in enumerate(cut.groups[::-1]):
        actor[group.begin : group.end] = index
    within = np.lexsort((step.prompt[order], step.tokens[order], actor))
    order = order[within]
    begins = np.array([group.begin for group in cut.groups])
    ends = np.array([group.end for group in cut.groups])
    seconds: Floats = np.empty(len(cut.groups))
    for device in {id(group.tier.device): group.tier.device for group in cut.groups}.values():
        on_device = np.array([group.tier.device is device for group in cut.groups])
        seconds[on_device] = GroupTimes(device, step, order, actor).time_s(begins[on_device], ends[on_device])
    return order, seconds.tolist()


def _tiers(actors: tuple[ActorPlan, ...], options: FleetOptions) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """The number of actors to wake, and of warm actors that are not needed."""
    used = Counter((actor.kind, actor.tier) for actor in actors)
    wake: dict[tuple[str, str], int] = {}
    release: dict[str, int] = {}
    for device in options.devices:
        for standby in device.ready:
            busy = used[device.kind, standby.tier]
            if standby.wait_s > 0 and busy:
                wake[device.kind, standby.tier] = busy
            elif standby.wait_s == 0 and busy < standby.actors:
                release[device.kind] = release.get(device.kind, 0) + standby.actors - busy
    return wake, release


def _split_prompts(step: Responses, actors: tuple[ActorPlan, ...]) -> int:
    homes = np.concatenate([step.prompt[actor.samples] * len(actors) + i for i, actor in enumerate(actors)])
    return int((np.bincount(np.unique(homes) // len(actors)) > 1).sum())
