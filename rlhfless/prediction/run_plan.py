"""Memory, time and cost of a run on its own devices."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlhfless.planning.dimensions import like
from rlhfless.planning.inputs import DeviceCount, count_on, model_config
from rlhfless.planning.memory_plan import Question
from rlhfless.planning.objects import PlannedCost
from rlhfless.planning.resolve import plan_problems, question_of, resolve
from rlhfless.planning.sizes import fitting_sizes
from rlhfless.planning.suggestions import nearest_change
from rlhfless.prediction.prefill import PlannedPrefill, planned_prefill
from rlhfless.prediction.scatter import Scatter
from rlhfless.prediction.schedules import NO_SCHEDULES, Predict, limit_of_run, schedules_of
from rlhfless.prediction.sensitivity import costs_usd
from rlhfless.prediction.simulated import Lengths, Predicted, arranged, lengths_of, predicted
from rlhfless.prediction.supervised_cost import written, written_lengths
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.policies.contract import best_of
from rlhfless.scaling.prices import SECONDS_PER_HOUR, load_price_book
from rlhfless.sim.experiment.shared import Arrangement
from rlhfless.sim.replay.calibrate import LearningFit, calibrate, learning_fit
from rlhfless.sim.replay.fleet import with_learner
from rlhfless.sim.replay.latency_file import LatencyFile
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.spec import RunSpec
from rlhfless.spec.base import count_of
from rlhfless.util.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planner:
    """A run, and known facts about its model and responses."""

    spec: RunSpec
    trace: Trace | None = None
    """An earlier run, used for its lengths and, on the same devices, its latencies."""
    measured: LatencyFile | None = None
    """Latencies measured on the requested devices."""
    hurried: bool = False
    found_lengths: Lengths | None = None
    """`lengths` found by another planner: reading them from the data takes seconds."""

    @cached_property
    def lengths(self) -> Lengths:
        """Return the response lengths that predictions assume."""
        if self.found_lengths is not None:
            return self.found_lengths
        return written_lengths(self.spec, self.trace) if self.spec.supervised else lengths_of(self.spec, self.trace)

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Return the model's config.json, or None if it cannot be read."""
        try:
            return dict(model_config(self.spec.model.path))
        except (OSError, ValueError):
            return None

    @cached_property
    def shape(self) -> ModelShape | None:
        """Return the model's sizes, or None if its config does not determine them."""
        try:
            return None if self.config is None else ModelShape.of_config(self.config)
        except UserError:
            return None

    def with_lengths(self, factor: float) -> Planner:
        """Return a planner with response lengths scaled by a factor."""
        return replace(self, found_lengths=self.lengths.times(factor))

    def quick(self) -> Planner:
        """Return a planner that makes faster, less precise predictions."""
        return replace(self, hurried=True, found_lengths=self.lengths)

    def predicted(self, asked: Question) -> tuple[Predicted | None, str | None]:
        """Return time and cost, or the reason that there is no prediction."""
        if self.config is None:
            return None, "the model's config.json cannot be read"
        try:
            latency: LatencyFile | LearningFit | None = self.measured
            if latency is None:
                latency = self._learning_of(asked) if self.spec.supervised else self._latency_of(asked)
            if latency is not None and not self.spec.supervised and not like(asked.spec, self.spec):
                return None, f"on {asked.sheet.kind} latencies are measured with the settings of the spec"
            found = self._made(asked, latency)
            # A fit to a run deviates as much as it does for that run itself.
            scatter = self._scatter if latency is not None and self.measured is None else None
            return found if scatter is None else replace(found, cost=scatter.banded(found.cost)), None
        except (UserError, ValueError) as error:
            return None, str(error).splitlines()[-1].strip()

    def arranged(self, asked: Question, runs: int) -> tuple[Scenario, list[Arrangement]]:
        """Return the ways to place several such runs on the devices, and their scenario. Raises UserError,
        ValueError."""
        assert self.config is not None, "the model's sizes are known"
        latency = self.measured or self._latency_of(asked)
        return arranged(asked, self.config, self.lengths, latency, runs)

    def _made(self, asked: Question, latency: LatencyFile | LearningFit | None) -> Predicted:
        """Return the prediction with these latencies; by data sheets if None. Raises UserError, ValueError."""
        if self.spec.supervised:
            return written(asked, self.lengths, latency)
        assert self.config is not None
        assert not isinstance(latency, LearningFit)
        return predicted(asked, self.config, self.lengths, latency, quick=self.hurried)

    @cached_property
    def _scatter(self) -> Scatter | None:
        """Return how the steps of the earlier run scatter around their own prediction."""
        assert self.trace is not None
        kinds = Counter({held.device: held.device_kind for held in self.trace.holdings}.values())
        try:
            spec = RunSpec.model_validate(self.trace.meta.spec)
            kind = spec.placement.kind or next(iter(kinds), CPU_KIND)
            own = question_of(spec, kind, kinds[kind])
            planner = Planner(own.spec, self.trace, hurried=self.hurried)
            latency = planner._learning_of(own) if spec.supervised else planner._latency_of(own)
            step_s = planner._made(own, latency).cost.step_s
        except (UserError, ValueError) as error:
            log.info("the run %s cannot be predicted itself: %s", self.trace.meta.run_id, error)
            kind, step_s = next(iter(kinds), CPU_KIND), None
        return Scatter.of(self.trace, step_s, kind)

    def row(self, asked: Question) -> dict[str, Any]:
        """Return PlannedDevices: whether the run fits, and if so its time and cost."""
        plan = asked.plan()
        problems = plan_problems(asked, plan)
        change = nearest_change(asked) if problems and not plan.fits else None
        found, reason = (None, None) if problems else self.predicted(asked)
        return {
            "kind": asked.sheet.kind,
            "count": asked.count,
            "placement": asked.spec.placement.mode,
            "fits": not problems,
            "problems": list(problems),
            "nearest_change": None if change is None else change.text,
            "predicted": None if found is None else found.cost.model_dump(),
            "costs_usd": {} if found is None else costs_usd(self.spec, asked.devices, found.cost.cost_usd),
            "reason": reason,
            "no_engine": asked.sheet.no_engine,
            "models": [] if found is None else _models(asked, found),
        }

    def sizes(self, spec: RunSpec, kind: str, present: int) -> dict[str, Any] | None:
        """Return PlannedSizes of a spec; None unless it is elastic. Raises InputError as `fitting_sizes`."""
        if (wanted := spec.placement.size_range) is None:
            return None
        fitting, quick = fitting_sizes(spec, kind, present, required=True), self.quick()
        found: dict[int, PlannedCost] = {}
        reason = None
        for each in fitting:
            assert each.asked is not None  # a plan is required
            answer, why = quick.predicted(each.asked)
            if answer is None:
                reason = why
            else:
                found[each.devices] = answer.cost
        most = fitting[-1].devices
        if wanted.max == "auto" and found:
            figures = [(cost.wall_s, cost.cost_usd) for cost in found.values()]
            most = list(found)[best_of(figures, spec.scaling.contract, limit_of_run(spec))]
        return {
            "kind": kind,
            "minimum": fitting[0].devices,
            "maximum": max(most, fitting[0].devices),
            "sizes": [
                {"devices": size, "step_s": cost and cost.step_s, "cost_usd": cost and cost.cost_usd}
                for size, cost in ((each.devices, found.get(each.devices)) for each in fitting)
            ],
            "reason": None if found else reason,
        }

    def schedules(self, asked: Question, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return `schedules` and `schedule_reason` of PlanObject. `row` is the run's own PlannedDevices."""
        if not row["fits"]:
            return NO_SCHEDULES
        return schedules_of(asked, self._beside(asked, row["predicted"]))

    def _beside(self, asked: Question, planned: Mapping[str, Any] | None) -> Predict:
        """Return quick predictions, scaled to match the full prediction `planned` for the run itself.

        Otherwise a plan would show two figures for the same run.
        """
        quick = self.quick()
        own, _ = quick.predicted(asked)
        if own is None or planned is None:
            return quick.predicted
        times = planned["step_s"] / own.cost.step_s
        usd = planned["cost_usd"] / own.cost.cost_usd if own.cost.cost_usd else 1.0

        def predict(other: Question) -> tuple[Predicted | None, str | None]:
            found, why = (own, None) if other == asked else quick.predicted(other)
            return None if found is None else found.scaled(times, usd), why

        return predict

    def prefill(self, asked: Question) -> PlannedPrefill | None:
        """Return whether separate prefill pays off; None if it is impossible."""
        if self.spec.supervised:
            return None
        latency = self.measured if self.measured is not None else self._latency_of(asked)
        return planned_prefill(asked, self.lengths, None if latency is None else latency.engine)

    def _latency_of(self, asked: Question) -> LatencyFile | None:
        """Return the latencies of the earlier run, adjusted to the requested learner, or None.

        The run must have been recorded with this model on these devices.
        """
        trace = self.trace
        if trace is None or not self._recorded_on(trace, asked):
            return None
        return with_learner(trace, calibrate([trace]), asked.spec.learner.world_size, asked.learner_sheet.kind)

    def _learning_of(self, asked: Question) -> LearningFit | None:
        """Like `_latency_of`, for a run without generation, if its learner had the same number of ranks."""
        trace = self.trace
        if trace is None or not self._recorded_on(trace, asked):
            return None
        ranks = trace.meta.spec["learner"]["ranks"]
        return learning_fit(trace) if ranks == asked.spec.learner.world_size else None

    @staticmethod
    def _recorded_on(trace: Trace, asked: Question) -> bool:
        """Return whether a run was recorded with the requested model and kinds of devices."""
        kinds = {holding.device_kind for holding in trace.holdings}
        return bool(trace.meta.spec["model"]["path"] == asked.spec.model.path) and kinds >= asked.devices.keys()


def _models(asked: Question, found: Predicted) -> list[dict[str, Any]]:
    """Return a PlannedModel for each teacher and judge with devices of the run."""
    price = load_price_book(asked.spec.scaling.prices).device(asked.learner_sheet.kind)
    held = {each.function: count_of(each.ranks) for each in asked.spec.teachers if each.path is not None}
    held |= {each.function: each.tensor_parallel_size for each in asked.spec.judges}
    hours = found.cost.wall_s / SECONDS_PER_HOUR
    return [
        {
            "function": function,
            "kind": price.kind,
            "devices": devices,
            "share": found.shares.get(function, 0.0),
            "pool_usd": devices * hours * price.usd_per_hour,
        }
        for function, devices in held.items()
    ]


def planned(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return a PlanObject as JSON. Raises InputError.

    `question` has the keys spec, present (devices by kind), and trace (folder of an earlier run, for its lengths and
    latencies).
    """
    planner = planner_of(question)
    devices = chosen_devices(planner.spec, question["present"])
    main = resolve(planner.spec, devices, required=True).asked
    assert main is not None
    chosen = planner.row(main)
    return {
        "spec": main.spec.model_dump(mode="json"),
        "steps": planner.spec.steps,
        "sequence_tokens": main.sequence_tokens,
        "parameters": main.shape.parameters,
        "chosen": chosen,
        "memory": _memory(main),
        **planner.schedules(main, chosen),
        "sizes": planner.sizes(planner.spec, devices.kind, question["present"].get(devices.kind, 0)),
        "lengths": planner.lengths.source,
        "missing": _missing(planner, devices.kind, question["present"]),
    }


def forecast(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return PlannedDevices of the run's own devices as JSON, with `sizes` (PlannedSizes). `question` is that of
    `planned`. Raises InputError."""
    planner = planner_of(question)
    devices = chosen_devices(planner.spec, question["present"])
    main = resolve(planner.spec, devices, required=True).asked
    assert main is not None
    sizes = planner.sizes(planner.spec, devices.kind, question["present"].get(devices.kind, 0))
    return planner.row(main) | {"sizes": sizes}


def planner_of(question: Mapping[str, Any]) -> Planner:
    """Return the planner for a question's `spec` and `trace`."""
    trace = read_trace(question["trace"], tokens=False) if question.get("trace") else None
    return Planner(RunSpec.model_validate(question["spec"]), trace)


def chosen_devices(spec: RunSpec, devices: Mapping[str, int]) -> DeviceCount:
    """Return the run's devices, from its spec or else from the service's devices."""
    gpus = [kind for kind in devices if kind not in (CPU_KIND, spec.placement.learner_kind)]
    kind = spec.placement.kind or (gpus[0] if gpus else CPU_KIND)
    return DeviceCount(kind, count_on(spec, devices.get(kind, 0)) or 1)


def _memory(asked: Question) -> dict[str, Any]:
    """Return the memory per device and phase, as `rlhfless plan` shows it."""
    plan = asked.plan()
    devices = [
        {
            "kind": device.kind,
            "count": device.count,
            "memory_bytes": int(device.memory_bytes),
            "size_bytes": int(device.size_bytes),
            "fits": device.fits,
            "functions": [
                {
                    "function": str(part.function),
                    "phases": [
                        {
                            "name": phase.name,
                            "size_bytes": int(phase.size_bytes),
                            "parts": {one.name: int(one.size_bytes) for one in phase.parts if one.size_bytes},
                        }
                        for phase in part.phases
                    ],
                }
                for part in device.functions
            ],
        }
        for device in plan.devices
    ]
    return {
        "devices": devices,
        "kv_tokens": int(max(plan.kv_tokens or 0, 0)),
        "micro_batch_tokens": int(plan.micro_batch_tokens),
        "host_bytes": int(plan.host_bytes),
        "shared_bytes": int(plan.shared_bytes),
    }


def _missing(planner: Planner, kind: str, devices: Mapping[str, int]) -> list[str]:
    missing, lengths, spec = [], planner.lengths, planner.spec
    if not spec.supervised and spec.algorithm.needs.with_signal and lengths.signal is None:
        missing.append("groups without a signal: taken to be none, without an earlier run by `lengths_of`")
    if not lengths.known:
        missing.append("response lengths: name an earlier run of these prompts with `lengths_of`")
    if not spec.supervised and spec.generation.speculation.on and not lengths.drafts(spec)[1]:
        missing.append("drafts: taken to save nothing, without an earlier run that speculated by `lengths_of`")
    if planner.trace is None:
        missing.append("measured latencies: an earlier run of this model on these devices, by `lengths_of`")
    if kind not in devices:
        missing.append(f"{kind}: the service has none now")
    return missing
