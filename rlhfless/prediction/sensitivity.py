"""Sensitivity of the choice among compared rows to other prices and other response lengths.

Prices scale the cost of a row; changes of the policy's decisions at other prices are ignored. For other lengths, the
candidate rows are predicted again: those on the Pareto front, and the next cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.prediction.simulated import Predicted
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.prices import PRICE_SOURCES, PriceSource, load_price_book
from rlhfless.spec import RunSpec

LENGTHS = (0.7, 1.3)
"""Multiples of the response lengths to try."""

NEXT = 4
"""Number of rows off the front to try at other lengths, cheapest first."""

Figures = Mapping[int, tuple[float, float]]
"""Time and cost of the run by row number."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The rows' times and costs after a change."""

    change: str
    figures: Figures
    unknown: tuple[str, ...] = ()
    """Kinds of devices without such a price."""


def costs_usd(spec: RunSpec, devices: Mapping[str, int], cost_usd: float) -> dict[PriceSource, float | None]:
    """Return a cost at the prices of each source of the bundled table, or None if a kind has no price there.

    `devices` are numbers by kind, all assumed to be held equally long.
    """
    book = load_price_book(spec.scaling.prices)
    used = sum(count * book.device(kind).usd_per_hour for kind, count in devices.items())
    found: dict[PriceSource, float | None] = {}
    for source in PRICE_SOURCES:
        terms = [(count, device_of(kind).prices[source]) for kind, count in devices.items()]
        known = [count * each.usd_per_hour for count, each in terms if each is not None]
        found[source] = cost_usd * sum(known) / used if used and len(known) == len(terms) else None
    return found


def at_other_prices(rows: Sequence[Mapping[str, Any]]) -> list[Changed]:
    """Return the figures of a comparison's rows with a prediction, at the prices of each source."""
    changes = []
    for source in PRICE_SOURCES:
        known = {number: row for number, row in enumerate(rows, start=1) if row["predicted"]}
        figures = {
            number: (row["predicted"]["wall_s"], row["costs_usd"][source])
            for number, row in known.items()
            if row["costs_usd"][source] is not None
        }
        unknown = {row["kind"] for number, row in known.items() if number not in figures}
        changes.append(Changed(f"prices: {source}", figures, tuple(sorted(unknown))))
    return changes


def tried_again(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the rows to predict at other lengths."""
    known = [number for number, row in enumerate(rows, start=1) if row["predicted"]]
    others = [number for number in known if not rows[number - 1]["on_front"]]
    others.sort(key=lambda number: rows[number - 1]["predicted"]["cost_usd"])
    return [number for number in known if rows[number - 1]["on_front"]] + others[:NEXT]


def at_other_lengths(numbers: Sequence[int], predicted: Callable[[float], Sequence[Predicted | None]]) -> list[Changed]:
    """Return the figures of the rows `numbers` at other lengths, from `predicted`, their predictions by factor."""
    changes = []
    for factor in LENGTHS:
        found = zip(numbers, predicted(factor), strict=True)
        figures = {number: (one.cost.wall_s, one.cost.cost_usd) for number, one in found if one is not None}
        changes.append(Changed(f"responses of {factor:.0%} of the length", figures))
    return changes


def as_json(rows: Sequence[Mapping[str, Any]], changes: Sequence[Changed]) -> list[dict[str, Any]]:
    """Return a ChangedChoice for each change after which a choice remains."""
    base = _ends({n: _figures(row) for n, row in enumerate(rows, start=1) if row["predicted"]})
    answers = []
    for each in changes:
        if ends := _ends(each.figures):
            fastest, cheapest = ends
            values = {"change": each.change, "fastest": fastest, "cheapest": cheapest, "unknown": list(each.unknown)}
            answers.append(values | {"stays": (fastest, cheapest) == base})
    return answers


def _figures(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["predicted"]["wall_s"], row["predicted"]["cost_usd"]


def _ends(figures: Figures) -> tuple[int, int] | None:
    """Return the fastest and the cheapest row, ties by the other figure. None without rows."""
    if not figures:
        return None
    return min(figures, key=lambda n: figures[n]), min(figures, key=lambda n: figures[n][::-1])
