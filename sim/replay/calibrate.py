"""Fit the time of each stage to recorded runs. Pure.

The engine is fitted by `rlhfless.scaling.latency.LatencyFit`, to every request of every actor. The other stages are
lines in the tokens of a call, fitted by medians (Theil, Sen): a few delayed calls do not change them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median

import numpy as np

from rlhfless.records import FunctionName, Invocation, StepRecord, Work, in_order
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.accounting import clip, cold_starts, length, union
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.devices import device_of, load_devices
from rlhfless.scaling.latency.fitted import LatencyFit, LinearEngine
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.timeline import BoolArray, Requests
from rlhfless.sim.replay.latency_file import EngineFit, LatencyFile, LineFit, TurnFit
from rlhfless.sim.replay.measured import helper_cores, means_s, overhead_s
from rlhfless.sim.replay.what_if import model_shape
from rlhfless.spec.generation import USUAL_SEQUENCES

MOST_PAIRS = 200
"""Most calls whose pairwise slopes are computed; of more calls, this many are taken, evenly spread."""

FIXED_SHARE = 0.1
"""Prior: the time of a call of no tokens, a round trip and an optimiser step, as a share of a typical call."""


PRIOR_WEIGHT = 1e-4
"""Small, because a whole trace has enough rows: the prior only decides what no row shows."""


class _WholeTrace(LatencyFit):
    """A fit in which all steps have equal weight, because the run is over and no step is outdated.

    As in the simulator, the iterations that prefill a prompt also generate its first token, and all their time is the
    price of the prefill; decoding generates the other tokens.
    """

    def forget(self) -> None:
        pass

    def observe(self, requests: Requests, learn: BoolArray) -> None:
        super().observe(dataclasses.replace(requests, response_tokens=requests.response_tokens - 1), learn)


def calibrate(traces: Sequence[Trace], keep: Callable[[int], bool] | None = None) -> LatencyFile:
    """Fit to all steps of the traces, or to those whose number `keep` accepts. Raises TraceError without any."""
    keep = keep or (lambda step: step > 0)  # evaluations before the first step have step 0
    steps = [(record, trace) for trace in traces for record in trace.steps if keep(record.step)]
    if not steps:
        raise TraceError(f"the trace of {traces[0].meta.run_id} has no step to fit to; record at least one")
    engine = _WholeTrace(_prior(traces[0]), PRIOR_WEIGHT)
    calls: list[Invocation] = []
    for trace in traces:
        kept = [call for call in trace.invocations if keep(call.step)]
        calls += kept
        for step, rollouts, generated in _generation_by_step(trace, kept):
            if keep(step):
                engine.observe_step(generated, rollouts, max_sequences(trace))
    by_work = _by_work(calls)
    if not by_work[Work.GENERATE]:
        raise TraceError(f"the trace of {traces[0].meta.run_id} has no generate calls; record a whole step")
    model, learning = engine.model(), _learning_fit(steps, by_work)
    return LatencyFile(
        traces=tuple(trace.meta.run_id for trace in traces),
        steps=len(steps),
        device_kind=device_kind(traces[0]),
        generation=EngineFit(**{name: getattr(model, name) for name in EngineFit.model_fields}),
        call_s=_call_s(traces, by_work[Work.GENERATE]),
        load_weights_s=_median_s(by_work[Work.LOAD_WEIGHTS]),
        start_s=_start_s(traces),
        starts=_other_starts(traces),
        turns=turns_of(calls),
        group_s=_group_s(traces, by_work[Work.SCORE]),
        columns=learning.columns,
        evaluate=_line(by_work[Work.EVALUATE]),
        learn=learning.learn,
        updates=learning.updates,
        publish_s=_median_s(by_work[Work.PUBLISH]),
        driver_s=learning.driver_s,
        helper_cores=_helper_cores(steps),
        mean_s=means_s(steps),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LearningFit:
    """The part of a LatencyFile that does not concern generation."""

    columns: dict[str, LineFit]
    updates: dict[str, LineFit]
    learn: LineFit
    driver_s: float


def learning_fit(trace: Trace) -> LearningFit:
    """Fit to a run that need not have generated anything. Raises TraceError if it has learned nothing."""
    return _learning_fit([(record, trace) for record in trace.steps if record.step > 0], _by_work(trace.invocations))


def _by_work(calls: Iterable[Invocation]) -> dict[Work, list[Invocation]]:
    by_work: dict[Work, list[Invocation]] = defaultdict(list)
    for call in calls:
        by_work[call.work].append(call)
    return by_work


def _learning_fit(
    steps: Sequence[tuple[StepRecord, Trace]], by_work: Mapping[Work, Sequence[Invocation]]
) -> LearningFit:
    learned = by_work.get(Work.LEARN, ())
    if not steps or not learned:
        raise TraceError("the trace has no learn calls; record a whole step")
    columns = {call.function for call in by_work.get(Work.LOGPROBS, ())}
    return LearningFit(
        _lines(by_work.get(Work.LOGPROBS, ())),
        _lines([call for call in learned if call.function in columns]),
        _line([call for call in learned if call.function not in columns]) or LineFit(fixed_s=0.0),
        median(overhead_s(*step)[0] for step in steps),
    )


def _lines(calls: Sequence[Invocation]) -> dict[str, LineFit]:
    names = in_order(call.function for call in calls)
    lines = {name: _line([call for call in calls if call.function == name]) for name in names}
    return {name: line for name, line in lines.items() if line is not None}


def device_kind(trace: Trace) -> str:
    """Return the device kind of the generation actors. Raises TraceError if the trace has none, or several."""
    kinds = {holding.device_kind for holding in trace.holdings if holding.function == FunctionName.GENERATION}
    if not kinds:
        raise TraceError(f"the trace of {trace.meta.run_id} has no generation; name a run of type rlhf")
    if len(kinds) > 1:
        raise TraceError(
            f"the trace of {trace.meta.run_id} has generation on {', '.join(sorted(kinds))}; one kind can be fitted"
        )
    return kinds.pop()


def max_sequences(trace: Trace) -> int:
    """Return the most sequences that an engine ran at once. Raises TraceError if the spec lacks the number."""
    try:
        most = trace.meta.spec["generation"]["engine"]["max_sequences"]
        return USUAL_SEQUENCES if most == "auto" else int(most)
    except (KeyError, TypeError) as error:
        raise TraceError(
            f"the spec in the trace of {trace.meta.run_id} has no generation.engine.max_sequences; "
            "restore meta.json from a copy of the run"
        ) from error


def line_through(sizes: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Fit a line with the median slope of all pairs of points and no negative part (Theil 1950, Sen 1968).

    Calls of similar sizes say little about the time of a call of no tokens. The part that their scatter leaves open is
    assumed to be FIXED_SHARE of a typical call, with a standard deviation of the same size (a normal prior).
    """
    count = len(sizes)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_PAIRS)).astype(int))
    points = [(float(sizes[index]), float(seconds[index])) for index in chosen]
    slopes = [(s2 - s1) / (x2 - x1) for (x1, s1), (x2, s2) in combinations(points, 2) if x1 != x2]
    if not slopes:
        return LineFit(fixed_s=median(s for _, s in points))
    slope = max(median(slopes), 0.0)
    fixed = max(median(s - slope * x for x, s in points), 0.0)
    prior_s = FIXED_SHARE * median(s for _, s in points)
    error_s = _fixed_error_s(points, LineFit(fixed_s=fixed, token_s=slope))
    fixed = (fixed * prior_s**2 + prior_s * error_s**2) / (prior_s**2 + error_s**2)
    return LineFit(fixed_s=fixed, token_s=max(median((s - fixed) / x for x, s in points if x > 0), 0.0))


def _fixed_error_s(points: Sequence[tuple[float, float]], line: LineFit) -> float:
    """Return the standard error of the fixed part of a line (least squares), with scatter by median deviation."""
    sizes = np.array([x for x, _ in points])
    scatter_s = 1.4826 * median(abs(s - line.at(x)) for x, s in points)  # for a normal distribution
    return float(scatter_s * np.sqrt(1 / sizes.size + sizes.mean() ** 2 / ((sizes - sizes.mean()) ** 2).sum()))


def _prior(trace: Trace) -> EngineModel:
    """Return a roofline of the run's model and devices; if they are not known, the measured seconds per token."""
    shape, kind = model_shape(trace), device_kind(trace)
    if shape is not None and kind in load_devices():
        return Roofline(shape, device_of(kind))
    rows = (row for rollout in trace.rollouts for row in rollout.requests)
    pace_s = median((row.finished_s - row.started_s) / row.response_tokens for row in rows)
    return LinearEngine(pace_s, 0.0, 0.0, pace_s / 100, 0.0)


def _generation_by_step(
    trace: Trace, calls: Iterable[Invocation]
) -> Iterable[tuple[int, list[TracedRollout], list[Invocation]]]:
    rollouts: dict[int, list[TracedRollout]] = defaultdict(list)
    generated: dict[int, list[Invocation]] = defaultdict(list)
    for row in trace.rollouts:
        rollouts[row.step].append(row)
    for call in calls:
        if call.work in (Work.GENERATE, Work.PRECOMPUTE):
            generated[call.step].append(call)
    return [(step, rows, generated[step]) for step, rows in sorted(rollouts.items())]


def _call_s(traces: Sequence[Trace], calls: Sequence[Invocation]) -> float:
    """Return the part of a generation call in which none of its samples ran, in seconds."""
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for trace in traces:
        for row in trace.rollouts:
            spans[row.actor, row.step].append((row.started_s, row.finished_s))
    beside = [
        call.duration_s - length(clip(union(spans[call.replica, call.step]), call.start_s, call.end_s))
        for call in calls
        if spans[call.replica, call.step]
    ]
    return max(median(beside), 0.0) if beside else 0.0


def _group_s(traces: Sequence[Trace], calls: Sequence[Invocation]) -> float:
    """Return the scoring time of a group in seconds; one call may score several."""
    siblings = max((row.sample_index + 1 for trace in traces for row in trace.rollouts), default=1)
    per_group = [call.duration_s * siblings / call.sequences for call in calls if call.sequences]
    return median(per_group) if per_group else 0.0


def turns_of(calls: Iterable[Invocation]) -> dict[str, TurnFit]:
    """Return the median sleep and wake times of each function that slept."""
    changes: dict[str, dict[Work, list[Invocation]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        if call.work in (Work.SLEEP, Work.WAKE):
            changes[call.function][call.work].append(call)
    return {
        name: TurnFit(sleep_s=_median_s(changes[name][Work.SLEEP]), wake_s=_median_s(changes[name][Work.WAKE]))
        for name in in_order(changes)
    }


def _starts_s(traces: Sequence[Trace], function: str) -> list[float]:
    return [
        end_s - start_s
        for trace in traces
        for start_s, end_s in cold_starts([h for h in trace.holdings if h.function == function])
    ]


def _other_starts(traces: Sequence[Trace]) -> dict[str, float]:
    names = in_order({holding.function for trace in traces for holding in trace.holdings} - {FunctionName.GENERATION})
    starts = {name: _starts_s(traces, name) for name in names}
    return {name: median(seconds) for name, seconds in starts.items() if seconds}


def _start_s(traces: Sequence[Trace]) -> float:
    starts = _starts_s(traces, FunctionName.GENERATION)
    return median(starts) if starts else 0.0


def _helper_cores(steps: Sequence[tuple[StepRecord, Trace]]) -> float:
    known = [cores for step in steps if (cores := helper_cores(*step)) is not None]
    return median(known) if known else 0.0


def _line(calls: Sequence[Invocation]) -> LineFit | None:
    if not calls:
        return None
    computed = [call.input_tokens - call.cached_tokens for call in calls]
    return line_through(computed, [call.duration_s for call in calls])


def _median_s(calls: Sequence[Invocation]) -> float:
    return median(call.duration_s for call in calls) if calls else 0.0
