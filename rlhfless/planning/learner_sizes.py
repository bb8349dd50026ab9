"""The sizes of a learner that may change its number of ranks (`learner.min_ranks`) or the kind of its devices
(`placement.learner_elsewhere`), side by side: time and cost of the run with each, and the one that the contract
chooses.

A run begins with `learner.ranks`, and looks between two steps which size suits its contract by the times that it has
measured (rlhfless.scaling.learner_ranks); devices of the others are given back. So each size is the run on fewer
devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfless.planning.inputs import rank_counts
from rlhfless.planning.question import Question, edited
from rlhfless.planning.schedules import Predict, limit_of_run
from rlhfless.scaling.learner_ranks import GroupSize
from rlhfless.scaling.plan import best_of, contract_for_step
from rlhfless.scaling.prices import SECONDS_PER_HOUR, load_price_book

NO_SIZES: dict[str, Any] = {"learner_sizes": [], "learner_reason": None}


def sizes_of(asked: Question, predict: Predict) -> dict[str, Any]:
    """`learner_sizes` and `learner_reason` of PlanObject; nothing for a learner of one size."""
    spec = asked.spec
    own, most = asked.learner_sheet.kind, spec.learner.world_size
    counts: tuple[int, ...] = (most,)
    if spec.learner.fewest_ranks < most:
        counts = rank_counts(spec, asked.sheet.kind, asked.count, asked.sequence_tokens)
    sizes = {GroupSize(ranks, own): _with(asked, ranks) for ranks in counts}
    sizes |= {GroupSize(n, kind): _elsewhere(asked, kind, n) for kind, n in spec.placement.learner_elsewhere.items()}
    found = {size: one.cost for size, run in sizes.items() if (one := predict(run)[0]) is not None}
    if len(sizes) == 1 or not found:
        return NO_SIZES
    released_usd_per_s = _released_usd_per_s(asked)
    usd = [
        cost.cost_usd + (most - (size.kind == own) * size.ranks) * released_usd_per_s * cost.wall_s
        for size, cost in found.items()
    ]
    figures = [(cost.wall_s, cost_usd) for cost, cost_usd in zip(found.values(), usd, strict=True)]
    chosen = list(found)[best_of(figures, spec.scaling.contract, limit_of_run(spec))]
    rows = [
        {
            "ranks": size.ranks,
            "kind": size.kind,
            "step_s": cost.step_s,
            "step_usd": cost_usd / cost.steps,
            "wall_s": cost.wall_s,
            "cost_usd": cost_usd,
            "chosen": size == chosen,
        }
        for (size, cost), cost_usd in zip(found.items(), usd, strict=True)
    ]
    contract = contract_for_step(spec.scaling.contract, steps_left=spec.steps)
    begins = f"the run begins with {GroupSize(most, own)}, and takes the size that suits the times of its steps"
    return {
        "learner_sizes": rows,
        "learner_reason": f"{chosen} is chosen by the contract (of a step: {contract}); {begins}",
    }


def _released_usd_per_s(asked: Question) -> float:
    """What a device that is given back goes on to cost."""
    price = load_price_book(asked.spec.scaling.prices).device(asked.learner_sheet.kind)
    return price.released_usd_per_hour / SECONDS_PER_HOUR


def _elsewhere(asked: Question, kind: str, count: int) -> Question:
    """The run whose learner's side is on so many devices of another kind from the first step on. Live a reference or a
    critic beside it stays where it is."""
    placement, own = asked.spec.placement, asked.sheet.kind
    changes: dict[str, Any] = {
        "learner.ranks": count,
        "learner.min_ranks": None,
        "placement.learner_devices": count,
        "placement.learner_kind": None if kind == own else kind,
        "placement.learner_elsewhere": {},
    }
    drawing = asked.count - (placement.learner_devices if placement.learner_kind is None else 0)
    return replace(asked, spec=edited(asked.spec, changes), count=drawing + (count if kind == own else 0))


def _with(asked: Question, ranks: int) -> Question:
    """The run whose learner has so many ranks from the first step on, without the devices that these leave. A reference
    or a critic beside it has no more then, either; live they keep theirs."""
    spec = asked.spec
    fewer = spec.learner.world_size - ranks
    changes: dict[str, Any] = {"learner.ranks": ranks, "learner.min_ranks": None, "placement.learner_elsewhere": {}}
    if not spec.supervised:
        changes["placement.learner_devices"] = spec.placement.learner_devices - fewer
    count = asked.count if spec.placement.learner_kind is not None else asked.count - fewer
    return replace(asked, spec=edited(spec, changes), count=count)
