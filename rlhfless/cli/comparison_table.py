"""A comparison of devices and placements, as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType

from rlhfless.cli.tables import table
from rlhfless.planning.objects import ComparedDevices, ComparisonObject
from rlhfless.telemetry.numbers import clock, decimal, money
from rlhfless.telemetry.terminal import Prose, whole
from rlhfless.util.text import legible

MOST_REASONS = 8
"""Reasons why devices do not hold a run that are shown; `--json` has all."""


def comparison_lines(compared: ComparisonObject) -> RenderableType:
    """The rows that fit, those on the front marked, with numbers to choose them by; and why others do not fit."""
    made = table("", "devices", "placement", "step", "run", "cost", "$/M tok", "kWh", "busiest", texts=3, padding=1)
    named = any(row.engine != "vllm" for row in compared.rows)
    for number, row in enumerate(compared.rows, start=1):
        if row.predicted is None:
            continue
        busiest, share = max(row.shares.items(), key=lambda item: item[1])
        made.add_row(
            f"{number}{' *' if row.on_front else ''}",
            _devices(row, named) + (" (plan only)" if row.no_engine else ""),
            row.placement,
            f"{decimal(row.predicted.step_s, 0)} s",
            clock(row.predicted.wall_s),
            money(row.predicted.cost_usd),
            decimal(row.usd_per_million_tokens, 2),
            "-" if row.energy_kwh is None else decimal(row.energy_kwh, 2),
            f"{busiest} {share:.0%}",
            style="bold" if row.on_front else "",
        )
    lengths = whole(f"response lengths: {legible(compared.lengths)}")
    decided = verdict(compared)
    last = ("", Prose(decided, style="bold")) if decided else ()
    return Group(made, "", *map(Prose, _notes(compared, named)), lengths, *last)


def verdict(compared: ComparisonObject) -> str:
    """The row to take under the run's contract, which orders them, and what others would change; empty if none can
    run."""
    rows = [(number, row) for number, row in enumerate(compared.rows, start=1) if row.predicted and not row.no_engine]
    if not rows:
        return ""
    number, best = rows[0]
    assert best.predicted is not None
    time_s, usd = best.predicted.wall_s, best.predicted.cost_usd
    text = f"Take row {number}, {best.count} x {best.kind}, {best.placement}: {clock(time_s)} for {money(usd)}."
    by_time = min(rows, key=lambda each: each[1].predicted.wall_s if each[1].predicted else math.inf)
    by_cost = min(rows, key=lambda each: each[1].predicted.cost_usd if each[1].predicted else math.inf)
    for what, (other, row) in (("fastest", by_time), ("cheapest", by_cost)):
        if other == number or row.predicted is None:
            continue
        times, cost = row.predicted.wall_s / time_s, row.predicted.cost_usd / usd if usd else 1.0
        text += f" The {what}, row {other}, takes {times:.2f} times as long at {cost:.2f} times the cost."
    changed = [each.change for each in compared.sensitivity if not each.stays]
    return text + (f" Another row is the fastest or the cheapest with {' or '.join(changed)}." if changed else "")


def _devices(row: ComparedDevices, named: bool) -> str:
    """The devices; with the engine, if rows differ in it, and the settings that are not the usual ones."""
    draws = [row.engine] if named else []
    draws += [each for each in (row.quantization, row.speculation) if each != "off"]
    if not row.share_prefixes:
        draws.append("no sharing")
    return " ".join([f"{row.count} x {row.kind}", *draws])


def _notes(compared: ComparisonObject, named: bool) -> Iterator[str]:
    """What the table means, and the rows that are not in it."""
    if compared.left_out:
        yield (
            f"{compared.left_out} of the {compared.tried} choices that were tried are left out, the worst by the run's "
            "contract; --limit shows more, --devices names others"
        )
    yield "* no other is both faster and cheaper; kWh of a step, at most"
    if any(row.no_engine for row in compared.rows):
        yield "(plan only) no run can be started so; --json says why, and what each engine's times were taken from"
    for each in compared.sensitivity:
        ends = f"fastest row {each.fastest}, cheapest row {each.cheapest}"
        unknown = f"; not known for {', '.join(each.unknown)}" if each.unknown else ""
        yield f"{each.change}: {ends}{' as above' if each.stays else ''}{unknown}"
    left = [row for row in compared.rows if row.predicted is None]
    if left:
        yield f"without a prediction are {len(left)} of {len(compared.rows)}:"
    for row in left[:MOST_REASONS]:
        if row.fits:
            yield f"{_devices(row, named)}, {row.placement}: {row.reason}"
            continue
        why = f"fits with {row.nearest_change}" if row.nearest_change else next(iter(row.problems), row.reason or "")
        yield f"{_devices(row, named)}, {row.placement}: {why}"
