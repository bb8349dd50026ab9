"""Whether a choice stays at other prices and lengths, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless.planning.objects import PlannedCost
from rlhfless.prediction.sensitivity import as_json, at_other_lengths, at_other_prices, costs_usd, tried_again
from rlhfless.prediction.simulated import Lengths, Predicted
from rlhfless.spec import RunSpec

SPEC = RunSpec.model_validate(
    {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}]}
)


def row(kind: str, wall_s: float | None, cost_usd: float = 0.0, on_front: bool = False, **costs: Any) -> dict[str, Any]:
    predicted = None if wall_s is None else {"wall_s": wall_s, "cost_usd": cost_usd}
    return {"kind": kind, "predicted": predicted, "costs_usd": costs, "on_front": on_front}


ROWS = [
    row("b200", 100.0, 50.0, True, rent=50.0, hyperscaler=130.0),
    row("h100", 200.0, 30.0, True, rent=30.0, hyperscaler=100.0),
    row("mi325x", 300.0, 20.0, True, rent=20.0, hyperscaler=None),
    row("l40s", 400.0, 60.0, rent=60.0, hyperscaler=90.0),
    row("a100-80gb", None),
]


def test_a_cost_at_the_prices_of_each_source() -> None:
    """On H100 rent is 2.95 an hour and the hyperscaler's price 10; nobody was read to sell MI325X on demand."""
    assert costs_usd(SPEC, {"h100": 8}, 5.9) == pytest.approx({"rent": 5.9, "hyperscaler": 20.0})
    assert costs_usd(SPEC, {"mi325x": 1}, 1.0) == {"rent": 1.0, "hyperscaler": None}
    # 8 at 1.548 and 2 at 2.95 are some 18.3 an hour; 8 at 3.50 and 2 at 10 are 48.
    both = costs_usd(SPEC, {"l40s": 8, "h100": 2}, 18.3)
    assert both == pytest.approx({"rent": 18.3, "hyperscaler": 48.0}, rel=1e-3)
    assert costs_usd(SPEC, {"mi325x": 8, "h100": 2}, 1.0)["hyperscaler"] is None


def test_at_other_prices_another_row_may_be_the_cheapest() -> None:
    rent, hyperscaler = as_json(ROWS, at_other_prices(ROWS))
    assert rent == {"change": "prices: rent", "fastest": 1, "cheapest": 3, "stays": True, "unknown": []}
    assert (hyperscaler["fastest"], hyperscaler["cheapest"], hyperscaler["stays"]) == (1, 4, False)
    assert hyperscaler["unknown"] == ["mi325x"]


def found(wall_s: float, cost_usd: float) -> Predicted:
    cost = PlannedCost(
        steps=1, step_s=wall_s, wall_s=wall_s, wall_low_s=0, wall_high_s=0,
        cost_usd=cost_usd, cost_low_usd=0, cost_high_usd=0,
    )  # fmt: skip
    return Predicted(cost, 1.0, 1.0, {})


def test_at_other_lengths_the_rows_that_may_be_chosen_are_predicted_again() -> None:
    assert tried_again(ROWS) == [1, 2, 3, 4]
    shorter = [found(70.0, 35.0), found(60.0, 9.0), found(210.0, 14.0), None]
    longer = [found(130.0, 65.0), found(260.0, 39.0), found(390.0, 26.0), found(500.0, 80.0)]
    changes = at_other_lengths([1, 2, 3, 4], lambda factor: shorter if factor < 1 else longer)
    answers = as_json(ROWS, changes)
    assert [each["change"] for each in answers] == ["responses of 70% of the length", "responses of 130% of the length"]
    assert [(each["fastest"], each["cheapest"], each["stays"]) for each in answers] == [(2, 2, False), (1, 3, True)]
    assert as_json(ROWS, at_other_lengths([1], lambda _factor: [None])) == [], "a run that cannot be predicted so"


def test_only_few_rows_behind_the_front_are_predicted_again() -> None:
    rows = [row("h100", 1.0, 9.0, True), *(row("h100", 2.0, float(cost)) for cost in range(19, 9, -1))]
    assert tried_again(rows) == [1, 11, 10, 9, 8]


def test_longer_responses_keep_their_spread() -> None:
    lengths = Lengths(100.0, 120.0, 0.7, 256.0, "test", known=True)
    assert lengths.times(1.3) == Lengths(130.0, 156.0, 0.7, 256.0, "test", known=True)
