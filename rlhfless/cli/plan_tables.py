"""The tables of plans: memory, time and cost of a run, and comparisons of devices and placements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.cli.tables import table
from rlhfless.planning.host_memory import CHART_KEY, chart_shared_memory
from rlhfless.planning.memory_plan import MemoryPlan, Question
from rlhfless.planning.objects import (
    ComparedDevices,
    ComparisonObject,
    PlannedDevices,
    PlannedSchedule,
    PlannedSizes,
    PlanObject,
)
from rlhfless.planning.suggestions import Change
from rlhfless.scaling.memory import GIB
from rlhfless.telemetry.terminal import Prose, clock, decimal, money, parameter_count, whole
from rlhfless.util.text import legible

SHORT_S = 10.0
"""Runs that take less are shown with a digit after the point."""


def memory_lines(
    asked: Question, plan: MemoryPlan, problems: Sequence[str], change: Change | None
) -> list[RenderableType]:
    """Return the memory by device and phase, what decides it, why the run is refused, and what would fit."""
    kind = asked.spec.placement.learner_kind
    apart = "" if kind is None else f" and {asked.learner_count} x {kind} for the learner"
    learner = asked.spec.learner
    cache = "" if plan.kv_tokens is None else f"KV cache of an actor: {max(plan.kv_tokens, 0):,} tokens; "
    lines: list[RenderableType] = [
        Prose(
            f"{parameter_count(asked.shape.parameters)} parameters on {asked.count} x {asked.sheet.kind}{apart}, "
            f"{asked.spec.placement.mode}, sequences of at most {plan.sequence_tokens:,} tokens"
        ),
        _memory_table(plan),
        Prose(
            f"{cache}largest micro-batch: {plan.micro_batch_tokens:,} tokens (learner.micro_batch_tokens is "
            f"{learner.pass_tokens:,}); activations are {'computed twice' if learner.recomputes else 'kept'} "
            "(learner.gradient_checkpointing)"
        ),
        Prose(
            f"host memory {plan.host_bytes / GIB:.1f} GiB in all; shared memory {plan.shared_bytes / GIB:.1f} GiB on "
            f"the learner's node, {plan.cache_bytes / GIB:.1f} on each other one; {plan.checkpoint_bytes / GIB:.1f} "
            "GiB more host memory while a checkpoint is written in the background"
        ),
        Prose(f"on Kubernetes at least {CHART_KEY}: {chart_shared_memory(plan.shared_bytes)}, for each run at once"),
    ]
    if asked.sheet.no_engine is not None:
        lines.append(Prose(f"a plan only: {asked.sheet.no_engine}", style="red"))
    if learner.copies > 1:
        ranks = learner.split_over(learner.world_size)
        text = f"the learner's states are split over {ranks} ranks each, in {learner.copies} copies"
        lines.append(Prose(f"{text} (learner.shard_ranks)"))
    if (number := learner.experts_over(learner.world_size, asked.shape.divisible_experts)) > 1:
        held = asked.shape.divisible_experts // number
        lines.append(Prose(f"{number} ranks divide the experts, {held} of a layer each (learner.expert_parallel)"))
    lines += [Prose(f"refused: {problem}", style="red") for problem in problems]
    if change is not None:
        lines.append(Prose(f"nearest change that fits: {change.text}"))
    elif not plan.fits:
        states = f"{16 * asked.shape.parameters / GIB:.1f} GiB, which its ranks share: see docs/sizing.md"
        lines.append(Prose(f"no one or two known changes make it fit. The states of the learner are {states}"))
    return lines


def _memory_table(plan: MemoryPlan) -> Table:
    made = table("device", "function", "phase", "parts", "GiB", texts=4)
    made.columns[0].no_wrap = False
    for device in plan.devices:
        name = f"{device.count} x {device.kind}"
        for part, ranks in Counter(device.functions).items():
            function = str(part.function) if ranks == 1 else f"{ranks} x {part.function}"
            for phase in part.phases:
                largest = phase is part.largest
                parts = ", ".join(f"{p.name} {p.size_bytes / GIB:.1f}" for p in phase.parts if p.size_bytes)
                cells = name, function, phase.name, parts if largest else "", f"{phase.size_bytes / GIB:.1f}"
                made.add_row(*cells, style="" if largest else "dim")
                name = function = ""
        state = "fits in" if device.fits else "[red]does not fit in[/red]"
        made.add_row("", f"{state} {device.memory_bytes / GIB:.1f}", "", "", f"{device.size_bytes / GIB:.1f}")
    return made


def cost_lines(row: Mapping[str, Any], schedules: Mapping[str, Any], lengths: str) -> list[RenderableType]:
    """Return time and cost on the run's devices, under each schedule, and at other prices."""
    rows = _schedules(schedules)
    lines: list[RenderableType] = ["", devices_lines([PlannedDevices.model_validate(row)])]
    lines += ["", schedules_lines(rows, schedules["schedule_reason"])] if rows else []
    for source, usd in row["costs_usd"].items():
        text = "no price was read" if usd is None else money(usd)
        lines.append(Prose(f"the run at the price of the table, {source}: {text}"))
    return [*lines, whole(f"response lengths: {legible(lengths)}")]


def sizes_lines(sizes: Mapping[str, Any]) -> list[RenderableType]:
    """Return the sizes of an elastic run, with the time and cost of each."""
    planned = PlannedSizes.model_validate(sizes)
    made = table("size", "step", "run", texts=1)
    made.add_column("")
    for each in planned.sizes:
        marks = {planned.minimum: "min", planned.maximum: "max"}
        step = "-" if each.step_s is None else f"{decimal(each.step_s, 2)} s"
        made.add_row(f"{each.devices} x {planned.kind}", step, money(each.cost_usd), marks.get(each.devices, ""))
    text = f"elastic: from {planned.minimum} to {planned.maximum} x {planned.kind}, as other runs come and go"
    unknown = [] if planned.reason is None else [Prose(f"time by size is not predicted: {planned.reason}")]
    return ["", made, Prose(text), *unknown]


def verdict_lines(row: Mapping[str, Any], schedules: Mapping[str, Any]) -> list[RenderableType]:
    """Return which devices and schedule to take, and which schedule would be faster with older samples."""
    if row["predicted"] is None:
        return []
    rows, name = _schedules(schedules), ""
    wall_s, usd = row["predicted"]["wall_s"], row["predicted"]["cost_usd"]
    chosen = next((each for each in rows if each.chosen), None)
    if chosen is not None and chosen.wall_s is not None and chosen.cost_usd is not None:
        name, wall_s, usd = f" with schedule {chosen.schedule}", chosen.wall_s, chosen.cost_usd
    text = f"Take these devices{name}: {clock(wall_s)} for {money(usd)}."
    times = {each.wall_s: each for each in reversed(rows) if each.refused is None and each.wall_s is not None}
    if times and (best_s := min(times)) < 0.99 * wall_s:
        best = times[best_s]
        text += (
            f" Where samples may be {best.max_staleness} versions old, {best.schedule} takes "
            f"{best_s / wall_s:.2f} times as long, for {money(best.cost_usd)}."
        )
    return ["", Prose(text, style="bold")]


def _schedules(schedules: Mapping[str, Any]) -> list[PlannedSchedule]:
    return [PlannedSchedule.model_validate(each) for each in schedules["schedules"]]


def plan_lines(plan: PlanObject) -> RenderableType:
    """Render the plan for the run's own devices, and the missing inputs of a better answer."""
    parts: list[RenderableType] = [devices_lines([plan.chosen])]
    parts += [Text(""), schedules_lines(plan.schedules, plan.schedule_reason)] if plan.schedules else []
    parts += [] if plan.sizes is None else sizes_lines(plan.sizes.model_dump())
    parts += ["", whole(f"response lengths: {legible(plan.lengths)}")]
    return Group(*parts, *(Prose(f"missing: {text}") for text in plan.missing))


def schedules_lines(rows: Sequence[PlannedSchedule], reason: str | None) -> RenderableType:
    """Time and cost under each schedule; below, why one is refused that brings nothing, and which is chosen."""
    refused: dict[str, list[str]] = {}
    made = table("schedule", "versions behind", "step", "cost", "run", "cost", texts=1)
    made.add_column("")
    for row in rows:
        cells = ["-", "-", "-", "-"]
        if row.step_s is not None and row.wall_s is not None:
            cells = [f"{decimal(row.step_s, 2)} s", money(row.step_usd), clock(row.wall_s), money(row.cost_usd)]
        mark = "refused" if row.refused else "chosen" if row.chosen else ""
        made.add_row(row.schedule, f"up to {row.max_staleness}" if row.max_staleness else "0", *cells, mark)
        if row.refused and row.refused not in (reason or ""):
            refused.setdefault(row.refused, []).append(row.schedule)
    notes = [f"refused: {' and '.join(names)}: {why}" for why, names in refused.items()]
    return Group(made, *map(Prose, [*notes, *([reason] if reason else [])]))


def devices_lines(rows: Sequence[PlannedDevices]) -> RenderableType:
    """Time and cost of a run, by devices, each with its band; below, why some have none."""
    made = table("devices", "placement", "step", "run", "band", "cost", "band", texts=2)
    made.columns[0].no_wrap = False
    notes = []
    for row in rows:
        cells, predicted = [f"{row.count} x {row.kind}", row.placement], row.predicted
        if predicted is None:
            why = row.reason or row.nearest_change or next(iter(row.problems), "")
            made.add_row(*cells, "-")
            notes.append(f"{cells[0]}: {why if row.fits else f'does not fit; {why}'}")
            continue
        wall, low, high = (
            clock(s) if predicted.wall_s >= SHORT_S else f"{decimal(s, 1)} s"
            for s in (predicted.wall_s, predicted.wall_low_s, predicted.wall_high_s)
        )
        cells += [f"{decimal(predicted.step_s, 2)} s", wall, f"{low} to {high}", money(predicted.cost_usd)]
        made.add_row(*cells, f"{money(predicted.cost_low_usd)} to {money(predicted.cost_high_usd)}")
        notes += [f"band: {predicted.band}"] if predicted.band else []
        notes += [
            f"{each.function} works {each.share:.0%} of the time, on the run's devices; a pool of its own, "
            f"{each.devices} x {each.kind} for the whole run, would cost {money(each.pool_usd)}"
            for each in row.models
        ]
    return Group(made, *map(Prose, notes))


# -- comparisons


MOST_REASONS = 8
"""Reasons why devices do not hold a run that are shown; `--json` has all."""


def comparison_lines(compared: ComparisonObject) -> RenderableType:
    """Render the numbered rows that fit, with the front marked, and the reasons why others do not fit."""
    made = table("", "devices", "placement", "step", "run", "cost", "$/M tok", "kWh", "busiest", texts=3, padding=1)
    for number, row in enumerate(compared.rows, start=1):
        if row.predicted is None:
            continue
        busiest, share = max(row.shares.items(), key=lambda item: item[1])
        made.add_row(
            f"{number}{' *' if row.on_front else ''}",
            _devices(row) + (" (plan only)" if row.no_engine else ""),
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
    return Group(made, "", *map(Prose, _notes(compared)), lengths, *last)


def verdict(compared: ComparisonObject) -> str:
    """Recommend the best row under the run's contract, and say what would change the choice; empty if none can run."""
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


def _devices(row: ComparedDevices) -> str:
    """Return the devices, with settings that are not the defaults."""
    draws = [each for each in (row.quantization, row.speculation) if each != "off"]
    if not row.share_prefixes:
        draws.append("no sharing")
    return " ".join([f"{row.count} x {row.kind}", *draws])


def _notes(compared: ComparisonObject) -> Iterator[str]:
    """Yield what the table means, and the rows that are not in it."""
    if compared.left_out:
        yield (
            f"{compared.left_out} of the {compared.tried} choices that were tried are left out, the worst by the run's "
            "contract; --limit shows more, --devices names others"
        )
    yield "* no other is both faster and cheaper; kWh of a step, at most"
    if any(row.no_engine for row in compared.rows):
        yield "(plan only) no run can be started so; --json says why"
    for each in compared.sensitivity:
        ends = f"fastest row {each.fastest}, cheapest row {each.cheapest}"
        unknown = f"; not known for {', '.join(each.unknown)}" if each.unknown else ""
        yield f"{each.change}: {ends}{' as above' if each.stays else ''}{unknown}"
    left = [row for row in compared.rows if row.predicted is None]
    if left:
        yield f"without a prediction are {len(left)} of {len(compared.rows)}:"
    for row in left[:MOST_REASONS]:
        if row.fits:
            yield f"{_devices(row)}, {row.placement}: {row.reason}"
            continue
        why = f"fits with {row.nearest_change}" if row.nearest_change else next(iter(row.problems), row.reason or "")
        yield f"{_devices(row)}, {row.placement}: {why}"
