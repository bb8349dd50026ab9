"""Comparison of devices, placements and schedules for a run: whether it fits, and its time and cost.

Each choice is a spec of its own on devices of its own. The memory plan tells whether it fits, and the simulator, with
the run's own policy, how long a step takes. All choices are simulated with one seed at the expected lengths; choices on
the Pareto front (no other is both faster and cheaper) get the seeds and the band of a full plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rlhfless.planning.dimensions import (
    QUANTIZATION,
    SHARE_PREFIXES,
    SPECULATION,
    Dimensions,
    no_engine,
    quantization_problem,
    undrafted,
)
from rlhfless.planning.inputs import parsed_sides
from rlhfless.planning.objects import PlannedCost
from rlhfless.planning.resolve import plan_problems, question_of
from rlhfless.planning.suggestions import nearest_change
from rlhfless.prediction import sensitivity
from rlhfless.prediction.run_plan import Planner, planner_of
from rlhfless.prediction.schedules import limit_of_run
from rlhfless.prediction.simulated import Predicted
from rlhfless.scaling.latency.devices import DeviceSheet, device_of, load_devices
from rlhfless.scaling.placement import CPU_KIND, PlacementError
from rlhfless.scaling.policies.contract import order_of
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.experiment.figures import MILLION
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError
from rlhfless.spec.explain import explain

COUNTS = (1, 8, 16, 64)
"""Numbers of devices tried per kind of the price book: one, a node, two nodes, eight nodes. The smallest that fits the
run is tried, plus the next one for the best kinds."""

BEST_KINDS = 4
"""Number of kinds of the price book tried in every placement: those that meet the contract best when co-located."""

LIMIT = 20
"""Maximum rows of a comparison without named devices."""

SEARCH_S = 60.0
"""Time limit of the search in seconds, if no devices are named."""

LEARNER_SHARES = (4, 2)
"""When disaggregated, the learner side has 1 in N devices for each of these: published runs give it a quarter to a
half."""

LEARNER_KIND, LEARNER_DEVICES = "placement.learner_kind", "placement.learner_devices"
TURNS, SCHEDULE = "placement.turns", "schedule.type"
OWN_SCHEDULE = "schedule"

Again = Callable[[float, Sequence["Choice"]], Sequence[Predicted | None]]
"""Predicts choices with response lengths scaled by a factor."""

OnChoice = Callable[[int, int], None]
"""Called with the number of finished choices and the total."""

FEW = 16
"""Maximum number of choices computed in this process: starting processes would take longer."""

CHUNK = 4
"""Choices per task of a worker process, if there are many."""

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Choice:
    """Devices, and the spec's changes for its placement on them."""

    kind: str
    count: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key."""

    @property
    def devices(self) -> Mapping[str, int]:
        """Return the numbers of its devices, by kind."""
        learner = self.changes.get(LEARNER_KIND)
        return {self.kind: self.count} | ({} if learner is None else {learner: self.changes[LEARNER_DEVICES]})


@dataclass(frozen=True, slots=True)
class Tried:
    """A choice and its result."""

    choice: Choice
    placement: str
    problems: tuple[str, ...] = ()
    nearest_change: str | None = None
    predicted: Predicted | None = None
    reason: str | None = None


def comparison(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ComparisonObject as JSON. Raises InputError.

    `question` has the keys spec, devices (chosen by the user), present (devices by kind), the fields of Dimensions,
    trace (folder of an earlier run), deadline_s, and limit.
    """
    planner, devices = planner_of(question), question.get("devices") or ()
    named = {name: question[name] for name in Dimensions.model_fields if name in question}
    tried = compared(planner, devices, Dimensions.model_validate(named), present=question.get("present") or {})
    limit = question.get("limit") or (None if devices else LIMIT)
    return as_json(planner, tried, question.get("deadline_s"), again(planner), limit)


def again(planner: Planner) -> Again:
    """Return a function that predicts a few choices with other response lengths, in this process."""

    def predicted(factor: float, choices: Sequence[Choice]) -> list[Predicted | None]:
        other = planner.with_lengths(factor).quick()
        return [each.predicted for each in _each(other, choices, 1, lambda *_: None)]

    return predicted


def compared(
    planner: Planner,
    devices: Sequence[str],
    dimensions: Dimensions = Dimensions(),  # noqa: B008 (frozen)
    jobs: int = 1,
    on_choice: OnChoice | None = None,
    present: Mapping[str, int] = MappingProxyType({}),
) -> list[Tried]:
    """Return the results of all choices for devices such as `8xh100`, or `8xl40s+2xh100` with the learner's last.

    Without devices: for those that are `present`, and the best of the price book's. Raises InputError for unknown
    devices.
    """

    def tried_of(choices: Sequence[Choice]) -> list[Tried]:
        ways = dimensions.ways(planner.spec)
        every = [replace(each, changes={**each.changes, **way}) for each in choices for way in ways]
        return list(_each(planner.quick(), every, jobs, on_choice or (lambda *_: None)))

    tried = tried_of(choices_of(planner.spec, devices)) if devices else _searched(planner, present, tried_of)
    best = front(tried)
    again = iter(_each(planner, [each.choice for each in tried if each in best], jobs, lambda *_: None))
    return [next(again) if each in best else each for each in tried]


def choices_of(spec: RunSpec, devices: Sequence[str]) -> list[Choice]:
    """Return the devices in all placements and schedules possible on them."""
    return [
        Choice(of.kind, of.count, changes)
        for of, sides in (parsed_sides(text, draws=not spec.supervised) for text in devices)
        for changes in _placements(spec, of.kind, of.count, sides)
    ]


def _searched(
    planner: Planner, present: Mapping[str, int], tried_of: Callable[[Sequence[Choice]], list[Tried]]
) -> list[Tried]:
    """Return results for the present devices in every placement, and for the price book's kinds.

    Each kind is tried at the smallest number that fits the run, and the best kinds in every placement and at the next
    number.
    """
    spec, until_s = planner.spec, time.monotonic() + SEARCH_S
    there = [f"{count}x{kind}" for kind, count in present.items() if kind in load_devices() and count]
    tried = tried_of(choices_of(spec, there))
    known = load_price_book(spec.scaling.prices).kinds
    runs = [kind for kind, sheet in load_devices().items() if sheet.no_engine is None]
    left = {kind: list(COUNTS) for kind in runs if kind in known and kind != CPU_KIND}
    smallest: list[Tried] = []
    while pending := [(kind, counts.pop(0)) for kind, counts in left.items() if counts]:
        found = tried_of([choices_of(spec, [f"{count}x{kind}"])[0] for kind, count in pending])
        fits = {each.choice.kind for each in found if not each.problems}
        last = {kind for kind, _ in pending if not left[kind]}
        smallest += [each for each in found if each.choice.kind in fits | last]
        left = {kind: counts for kind, counts in left.items() if kind not in fits}
        if time.monotonic() > until_s:
            break
    best = dict.fromkeys((each.choice.kind, each.choice.count) for each in by_contract(spec, smallest))
    for kind, count in list(best)[:BEST_KINDS]:
        if time.monotonic() > until_s:
            break
        more = [each for each in COUNTS if each > count][:1]
        tried += tried_of(choices_of(spec, [f"{count}x{kind}"])[1:])
        tried += tried_of(choices_of(spec, [f"{each}x{kind}" for each in more]))
    return _without_twins([*tried, *smallest])


def _without_twins(tried: Sequence[Tried]) -> list[Tried]:
    """Return each choice once: present devices are also in the price book."""
    kept: list[Tried] = []
    for each in tried:
        if not any(each.choice == other.choice for other in kept):
            kept.append(each)
    return kept


def by_contract(spec: RunSpec, tried: Sequence[Tried]) -> list[Tried]:
    """Return the results with a prediction, best by the contract first, ties fastest first."""
    known = sorted((each for each in tried if each.predicted is not None), key=lambda one: _cost(one).wall_s)
    figures = [(_cost(each).wall_s, _cost(each).cost_usd) for each in known]
    return [known[index] for index in order_of(figures, spec.scaling.contract, limit_of_run(spec))]


def _placements(spec: RunSpec, kind: str, count: int, sides: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes of the spec, by dotted key. `sides` are those that give the learner devices of another kind."""
    if spec.supervised:  # the learner has all devices, and nothing is generated
        yield {"placement.mode": "colocated"}
        return
    if not sides:
        yield {"placement.mode": "colocated", SCHEDULE: "sync"}  # nothing overlaps on shared devices
        yield from ({"placement.mode": "colocated", **own} for own in _own(spec) if not spec.schedule.steps_ahead)
    learners = sorted({count // share for share in LEARNER_SHARES} - {0}) if kind != CPU_KIND else ()
    split = [{"placement.mode": "disaggregated", LEARNER_DEVICES: learner} for learner in learners]
    for apart in [sides] if sides else split:
        for schedule in ({SCHEDULE: "sync"}, {SCHEDULE: "one_step_off"}, *_own(spec)):
            yield {**apart, **schedule}


def _own(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Yield the spec's own schedule, unless every comparison tries it anyway."""
    if spec.schedule.type not in ("sync", "one_step_off"):
        yield {OWN_SCHEDULE: {"type": spec.schedule.type} | spec.schedule.model_dump(mode="json", exclude_unset=True)}


def _each(planner: Planner, choices: Sequence[Choice], jobs: int, on_choice: OnChoice) -> Iterator[Tried]:
    """Yield the results of the choices in order, computed in `jobs` processes; with one job, in this process."""
    if jobs == 1 or len(choices) <= FEW:
        for number, choice in enumerate(choices, start=1):
            yield try_choice(planner, choice)
            on_choice(number, len(choices))
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:  # a fork would copy this process without its threads
        chunk = CHUNK if len(choices) > CHUNK * jobs else 1
        found = pool.map(try_choice, [planner] * len(choices), choices, chunksize=chunk)
        for number, tried in enumerate(found, start=1):
            yield tried
            on_choice(number, len(choices))


def try_choice(planner: Planner, choice: Choice) -> Tried:
    """Return whether the run fits, and if so its time and cost.

    Functions that share devices take turns if the run fits only then or costs less: an engine has more room for KV
    while the other functions sleep.
    """
    tried = _tried(planner, choice)
    if choice.changes["placement.mode"] != "colocated" or choice.kind == CPU_KIND or TURNS in choice.changes:
        return tried
    in_turns = _tried(planner, replace(choice, changes={**choice.changes, TURNS: True}))
    if tried.predicted is None or in_turns.predicted is None:
        return tried if not tried.problems or in_turns.problems else in_turns
    return in_turns if _cost(in_turns).cost_usd < _cost(tried).cost_usd else tried


def _tried(planner: Planner, choice: Choice) -> Tried:
    placement = placement_of(choice)
    if problem := quantization_problem(planner.spec, choice.changes, choice.kind):
        return Tried(choice, placement, (problem,))
    try:
        asked = question_of(spec_of(planner.spec, choice), choice.kind, choice.count)
        plan = asked.plan()
    except (InputError, PlacementError) as error:
        return Tried(choice, placement, (str(error),))
    if problems := plan_problems(asked, plan):
        change = None if plan.fits else nearest_change(asked)
        return Tried(choice, placement, tuple(problems), None if change is None else change.text)
    if SPECULATION in choice.changes and (unknown := undrafted(asked.spec, planner.lengths.drafts(asked.spec)[1])):
        return Tried(choice, placement, reason=unknown)
    predicted, reason = planner.predicted(asked)
    return Tried(choice, placement, (), None, predicted, reason)


def spec_of(spec: RunSpec, choice: Choice) -> RunSpec:
    """Return the spec of a choice, leaving open everything that the user left open. Raises InputError."""
    values = spec.model_dump(mode="json", exclude_unset=True)
    values.pop("schedule", None)  # its other keys depend on the type
    devices = {"placement.kind": choice.kind, "placement.devices": choice.count}
    if spec.placement.learner_kind is not None:  # otherwise devices are of one kind
        devices[LEARNER_KIND] = None
    for key, value in {**devices, **choice.changes}.items():
        *sections, name = key.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    try:
        return RunSpec.model_validate(values)
    except ValidationError as error:
        raise InputError("the spec", explain(error, RunSpec, {})) from error


def placement_of(choice: Choice) -> str:
    """Return a short description of the placement, for a table."""
    own = f", {choice.changes[OWN_SCHEDULE]['type']}" if OWN_SCHEDULE in choice.changes else ""
    if choice.changes.get(TURNS):
        return f"in turns{own}"
    if choice.changes.get("placement.mode") == "disaggregated":
        ahead = ", 1 ahead" if choice.changes.get(SCHEDULE) == "one_step_off" else own
        of = f" {kind}" if (kind := choice.changes.get(LEARNER_KIND)) else ""
        return f"{choice.changes[LEARNER_DEVICES]}{of} learn{ahead}"
    return f"co-located{own}"


def front(tried: Sequence[Tried]) -> list[Tried]:
    """Return the Pareto front, fastest first: results for which no other is both faster and cheaper."""
    known = [each for each in tried if each.predicted is not None]
    kept: list[Tried] = []
    for each in sorted(known, key=lambda one: (_cost(one).wall_s, _cost(one).cost_usd)):
        if not kept or _cost(each).cost_usd < _cost(kept[-1]).cost_usd:
            kept.append(each)
    return kept


def energy_kwh(predicted: Predicted, sheet: DeviceSheet) -> float | None:
    """Return the maximum energy of a step: the devices' busy time at their rated power. None if that is unknown."""
    return None if sheet.power_w is None else predicted.busy_device_s * sheet.power_w.value / JOULES_PER_KWH


def as_json(
    planner: Planner,
    tried: Sequence[Tried],
    deadline_s: float | None = None,
    predict: Again | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return a ComparisonObject. Without `predict` it has no sensitivity to lengths."""
    best = front(tried)
    ranks = {id(each): rank for rank, each in enumerate(by_contract(planner.spec, tried))}

    def order(each: Tried) -> tuple[bool, int, int]:
        if each.predicted is None:
            return True, 3 if each.problems else 2, each.choice.count
        late = deadline_s is not None and _cost(each).wall_s > deadline_s
        return late, 0 if each in best else 1, ranks[id(each)]

    ordered = sorted(tried, key=order)[:limit]
    rows = [_row(planner, each, on_front=each in best) for each in ordered]
    changes = sensitivity.at_other_prices(rows)
    if predict is not None and not planner.spec.supervised:
        numbers = sensitivity.tried_again(rows)
        choices = [ordered[number - 1].choice for number in numbers]
        changes += sensitivity.at_other_lengths(numbers, lambda factor: predict(factor, choices))
    return {
        "steps": planner.spec.steps,
        "rows": rows,
        "tried": len(tried),
        "left_out": len(tried) - len(rows),
        "sensitivity": sensitivity.as_json(rows, changes),
        "lengths": planner.lengths.source,
    }


def _row(planner: Planner, tried: Tried, *, on_front: bool) -> dict[str, Any]:
    spec, choice, found = planner.spec, tried.choice, tried.predicted
    quantization = choice.changes.get(QUANTIZATION, spec.generation.quantization)
    figures: dict[str, Any] = dict.fromkeys(("predicted", "step_usd", "usd_per_million_tokens", "energy_kwh"))
    if found is not None:
        step_usd = found.cost.cost_usd / found.cost.steps
        figures = {
            "predicted": found.cost.model_dump(),
            "step_usd": step_usd,
            "usd_per_million_tokens": MILLION * step_usd / found.response_tokens,
            # The split of the busy time between kinds is unknown.
            "energy_kwh": energy_kwh(found, device_of(choice.kind)) if len(choice.devices) == 1 else None,
        }
    return figures | {
        "kind": choice.kind,
        "count": choice.count,
        "placement": tried.placement,
        "fits": not tried.problems,
        "problems": list(tried.problems),
        "nearest_change": tried.nearest_change,
        "costs_usd": {} if found is None else sensitivity.costs_usd(spec, choice.devices, found.cost.cost_usd),
        "reason": tried.reason,
        "no_engine": no_engine(spec, quantization, choice.kind, planner.shape),
        "quantization": quantization,
        "speculation": choice.changes.get(SPECULATION, {}).get("method", spec.generation.speculation.method),
        "share_prefixes": choice.changes.get(SHARE_PREFIXES, spec.learner.share_prefixes),
        "latency": None if found is None else found.latency,
        "changes": dict(choice.changes),
        "on_front": on_front,
        "shares": {} if found is None else dict(found.shares),
    }


def _cost(tried: Tried) -> PlannedCost:
    assert tried.predicted is not None
    return tried.predicted.cost
