"""Whether the choice among compared rows stays the same at other prices and at other response lengths.

Prices scale the cost of a row; that the policy would decide otherwise at other prices is left out. For lengths the
rows that may be chosen are predicted again: those on the front, and the next cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.planning.prediction import Predicted
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.prices import PRICE_SOURCES, PriceSource, load_price_book
from rlhfless.spec import RunSpec

LENGTHS = (0.7, 1.3)
"""Multiples of the response lengths that are tried."""

NEXT = 4
"""Rows behind the front that are tried at other lengths, the cheapest first."""

Figures = Mapping[int, tuple[float, float]]
"""Time and cost of the run by number of the row."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What the rows would take and cost."""

    change: str
    figures: Figures
    unknown: tuple[str, ...] = ()
    """Kinds of devices that have no such price."""


def costs_usd(spec: RunSpec, devices: Mapping[str, int], cost_usd: float) -> dict[PriceSource, float | None]:
    """A cost at the prices of each source of the bundled table; None where it has none of a kind. `devices`: their
    numbers by kind, all of which are taken to be held for as long."""
    book = load_price_book(spec.scaling.prices)
    used = sum(count * book.device(kind).usd_per_hour for kind, count in devices.items())
    found: dict[PriceSource, float | None] = {}
    for source in PRICE_SOURCES:
        terms = [(count, device_of(kind).prices[source]) for kind, count in devices.items()]
        known = [count * each.usd_per_hour for count, each in terms if each is not None]
        found[source] = cost_usd * sum(known) / used if used and len(known) == len(terms) else None
    return found


def at_other_prices(rows: Sequence[Mapping[str, Any]]) -> list[Changed]:
    """`rows` of a comparison, of which those with a prediction count."""
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
    """Numbers of the rows that are predicted at other lengths."""
    known = [number for number, row in enumerate(rows, start=1) if row["predicted"]]
    others = [number for number in known if not rows[number - 1]["on_front"]]
    others.sort(key=lambda number: rows[number - 1]["predicted"]["cost_usd"])
    return [number for number in known if rows[number - 1]["on_front"]] + others[:NEXT]


def at_other_lengths(numbers: Sequence[int], predicted: Callable[[float], Sequence[Predicted | None]]) -> list[Changed]:
    """`predicted`: of the rows with these numbers, by a factor of the lengths."""
    changes = []
    for factor in LENGTHS:
        found = zip(numbers, predicted(factor), strict=True)
        figures = {number: (one.cost.wall_s, one.cost.cost_usd) for number, one in found if one is not None}
        changes.append(Changed(f"responses of {factor:.0%} of the length", figures))
    return changes


def as_json(rows: Sequence[Mapping[str, Any]], changes: Sequence[Changed]) -> list[dict[str, Any]]:
    """ChangedChoice of each change that leaves a choice."""
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
    """The fastest row and the cheapest; of equals the one with the other figure smaller. None without rows."""
    if not figures:
        return None
    return min(figures, key=lambda n: figures[n]), min(figures, key=lambda n: figures[n][::-1])
