"""Compare predicted and measured seconds of a recorded run, stage by stage. Pure.

Generation, scoring, reference, learning and weights are simulated with fitted latencies. The driver's own time, in
which no function works, is the fitted constant. With a policy starts are simulated, without one they are as in the run.
The error is compared with the error of always predicting the mean of the fitted steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from rlhfless.records import StepRecord, Work, in_order
from rlhfless.records.ledger import PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace
from rlhfless.scaling.accounting import Phase, clip, column_phase, step_times, union
from rlhfless.scaling.policy import Policy
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.replay.calibrate import calibrate, device_kind
from rlhfless.sim.replay.latency_file import LatencyFile
from rlhfless.sim.replay.measured import STAGES, WALL, drawn_s, machine_cores, measured_s, overhead_s, shared_s
from rlhfless.sim.replay.recorded import AS_IT_WAS, AsRecorded, setup_of, steps_drawn
from rlhfless.sim.replay.what_if import OtherDevices, kv_tokens, on_kind
from rlhfless.sim.run import simulate
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.statistics import LEAST_VALUES, mean_interval

MOST_SCALED = 4.0
"""A stage whose replay is off by more than this factor has another cause than its scatter."""

PACE, LEAST_SHARE = 1.25, 0.1
"""A stage with at least LEAST_SHARE of a step has changed its pace if its judged seconds are off by more than PACE."""

AS_RECORDED = "as recorded"
"""The default policy of a replay."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Seconds by stage (the names of STAGES, and WALL)."""

    step: int
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]
    done_again: bool = False
    """Whether the step was repeated after a fault: only its last try, which may have generated nothing, was
    measured."""


@dataclass(frozen=True, slots=True)
class StageError:
    """The error of one stage over all steps."""

    stage: str
    measured_s: float
    """Mean."""
    predicted_s: float
    error: float
    """Median of |predicted - measured| / measured."""
    error_of_mean: float
    """The same for always predicting the mean of the fitted steps."""

    @property
    def skill(self) -> float | None:
        """1 - error / error_of_mean: 1 is perfect, 0 as good as the mean, below 0 worse; None if the mean is exact."""
        return 1 - self.error / self.error_of_mean if self.error_of_mean else None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens that a function computed in all steps, over the tokens with each shared prefix counted once."""

    function: str
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class Replay:
    """The simulated replay of a recorded run."""

    run_id: str
    policy: str
    """AS_RECORDED, or the name of another policy."""
    fitted_to: str
    steps: tuple[ReplayedStep, ...]
    predicted_usd: float
    """Cost of the steps, by the run's own price book; unsimulated time costs as much per second as the rest."""
    measured_usd: float
    mean_s: Mapping[str, float]
    """Mean seconds of the fitted steps, by stage."""
    prompt_tokens: tuple[PromptTokens, ...] = ()
    """By function; empty if the trace does not have them."""
    kv_tokens: int | None = None
    """Tokens of an actor's KV memory, as its engine reported; None: not in the trace, and assumed to suffice."""
    extrapolated_to: str = ""
    """The devices that the replay has and the run did not; empty for the run's own."""
    plans: tuple[tuple[int, str, str], ...] = ()
    """The steps that a policy planned in both the run and the replay, with both choices."""
    divided: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """By judged step: the response tokens that each actor generated in the replay, the most first."""

    @property
    def errors(self) -> list[StageError]:
        """Errors by stage, without stages that the run lacks, and without repeated steps unless all were repeated."""
        steps = [step for step in self.steps if not step.done_again] or self.steps
        return [
            self._error(stage, [step for step in steps if step.measured_s[stage] > 0])
            for stage in (*map(str, STAGES), WALL)
            if any(step.measured_s[stage] > 0 for step in steps)
        ]

    @property
    def changed_pace(self) -> str:
        """A message if the judged steps took much longer or shorter than the fit predicts; otherwise empty."""
        if self.policy != AS_RECORDED or self.extrapolated_to:
            return ""
        told = []
        for error in self.errors:
            times = error.measured_s / error.predicted_s if error.predicted_s else 1.0
            if error.measured_s > LEAST_SHARE * self.errors[-1].measured_s and abs(math.log(times)) > math.log(PACE):
                told.append(f"{error.stage} {times:.2f}")
        if not told:
            return ""
        return (
            f"These steps took other times than the fit to {self.fitted_to} predicts ({', '.join(told)} times): the "
            "pace of the machine, or what the run does, changed in between."
        )

    def report(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        errors = [{**asdict(error), "skill": error.skill} for error in self.errors]
        return {**asdict(self), "errors": errors}

    def _error(self, stage: str, steps: Sequence[ReplayedStep]) -> StageError:
        pairs = [(step.predicted_s[stage], step.measured_s[stage]) for step in steps]
        constant = self.mean_s[stage]
        return StageError(
            stage,
            fmean(measured for _, measured in pairs),
            fmean(predicted for predicted, _ in pairs),
            median(abs(predicted - measured) / measured for predicted, measured in pairs),
            median(abs(constant - measured) / measured for _, measured in pairs),
        )


def replay(
    trace: Trace,
    drawn: Sequence[RolloutBatch],
    latency: LatencyFile | None = None,
    policy: tuple[str, Policy] | None = None,
    other: OtherDevices = AS_IT_WAS,
) -> Replay:
    """Simulate the steps of a trace again; `drawn` are their batches (`read_runtime`).

    Without `latency`, latencies are fitted to the first half of the steps and the second half is judged. All steps are
    simulated, so that a policy knows what it knew in the run. Without `policy`, samples go to the actors that generated
    them. A fit to another kind of device than the requested one is extrapolated.

    Raises TraceError for a trace without whole steps, and for another number of actors without a policy.
    """
    batches = {batch.step: batch for batch in drawn}
    records = [record for record in trace.steps if record.step in batches]
    if not records:
        raise TraceError(
            f"the trace of {trace.meta.run_id} has no step with rollouts: replay a run of type rlhf that has done one"
        )
    fitted_to, judged = "the file given", records
    if latency is None:
        learned = records[: max(len(records) // 2, 1)]
        judged = records[len(learned) :] or records
        last = learned[-1].step
        latency, fitted_to = fitted([trace], [drawn], keep=lambda step: step <= last), f"steps 1 to {last}"
    if policy is None and other.actors is not None:
        raise TraceError(f"{other.actors} actors generate other samples than in {trace.meta.run_id}; name a policy")
    name, chosen = policy if policy is not None else (AS_RECORDED, AsRecorded(trace))
    prices = PriceBook.model_validate(trace.meta.prices)
    kind = other.kind or device_kind(trace)
    extrapolated = replace(other, kind=kind if kind != latency.device_kind else None)
    latency = on_kind(latency, kind)
    setup = setup_of(trace, latency, other)
    simulated = simulate(setup, chosen, prices, steps_drawn(setup, trace, [batches[record.step] for record in records]))
    again = {record.step: step for record, step in zip(records, one_after_another(simulated), strict=True)}
    cores = machine_cores(trace)
    steps = [
        ReplayedStep(
            record.step,
            _predicted_s(
                again[record.step],
                simulated,
                latency,
                batches[record.step],
                cores,
                latency.driver_s + (overhead_s(record, trace)[1] if policy is None else 0.0),
            ),
            measured_s(record, trace),
            done_again=record.resumed_s > record.start_s,
        )
        for record in judged
    ]
    predicted = [again[record.step] for record in judged]
    return Replay(
        trace.meta.run_id,
        name,
        fitted_to,
        tuple(steps),
        math.fsum(
            _usd(simulated, [record], prices) * step.predicted_s[WALL] / (record.end_s - record.start_s)
            for record, step in zip(predicted, steps, strict=True)
        ),
        _usd(trace, judged, prices),
        latency.mean_s,
        tuple(_prompt_tokens(judged, predicted)),
        kv_tokens(trace, device_kind(trace), kind),
        str(extrapolated),
        tuple(_plans(trace, simulated)),
        tuple(_divided(simulated, [record.step for record in judged])),
    )


def fitted(
    traces: Sequence[Trace], drawn: Sequence[Sequence[RolloutBatch]], keep: Callable[[int], bool] | None = None
) -> LatencyFile:
    """Fit latencies to the traces (see `calibrate`), scaled to the mean time of the fitted steps.

    Each stage and the total are scaled, because the fit uses medians, which do not keep means. Differences that the
    scatter of the steps explains remain. `drawn` are the batches of each trace.
    """
    latency = calibrate(traces, keep)

    def replayed(latency: LatencyFile) -> list[ReplayedStep]:
        replays = (replay(trace, batches, latency) for trace, batches in zip(traces, drawn, strict=True))
        steps = [step for again in replays for step in again.steps if keep is None or keep(step.step)]
        return [step for step in steps if not step.done_again] or steps

    steps = replayed(latency)
    latency = latency.scaled({str(stage): _biased(steps, str(stage)) for stage in STAGES})
    late_s = [step.measured_s[WALL] - step.predicted_s[WALL] for step in replayed(latency)]
    if not _may_be_chance(late_s):
        latency = latency.model_copy(update={"driver_s": max(latency.driver_s + fmean(late_s), 0.0)})
    return latency


def _biased(steps: Sequence[ReplayedStep], stage: str) -> float:
    """Return measured / predicted seconds of a stage over all steps; 1 if scatter explains the difference."""
    pairs = [(step.predicted_s[stage], step.measured_s[stage]) for step in steps]
    pairs = [pair for pair in pairs if min(pair) > 0]
    if _may_be_chance([math.log(measured / predicted) for predicted, measured in pairs]):
        return 1.0
    predicted_s, measured_s = (math.fsum(seconds) for seconds in zip(*pairs, strict=True))
    return min(max(measured_s / predicted_s, 1 / MOST_SCALED), MOST_SCALED)


def _may_be_chance(values: Sequence[float]) -> bool:
    """Return whether the mean of independent values may be 0: within its 95 % interval, or with too few values."""
    if len(values) < LEAST_VALUES:
        return True
    interval = mean_interval(values)
    return interval.low <= 0 <= interval.high


def one_after_another(simulated: Trace) -> Iterator[StepRecord]:
    """Yield steps as in a run's trace: each starts at the end of the previous one, even if generated earlier."""
    ended_s = -math.inf
    for step in simulated.steps:
        yield replace(step, start_s=max(step.start_s, ended_s))
        ended_s = step.end_s


def _plans(trace: Trace, simulated: Trace) -> Iterator[tuple[int, str, str]]:
    """Yield the last plan of each step; a repeated step has several."""
    ran, again = ({row.step: row.choice for row in each.decisions if row.kind == "plan"} for each in (trace, simulated))
    for step in ran.keys() & again.keys():
        yield step, ran[step], again[step]


def _divided(simulated: Trace, steps: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    tokens: dict[int, dict[str, int]] = {step: defaultdict(int) for step in steps}
    for call in simulated.invocations:
        if call.work is Work.GENERATE and call.step in tokens:
            tokens[call.step][call.replica] += call.output_tokens
    for step, by_actor in tokens.items():
        yield step, tuple(sorted(by_actor.values(), reverse=True))


def _prompt_tokens(measured: Sequence[StepRecord], predicted: Sequence[StepRecord]) -> Iterator[PromptTokens]:
    prefix = f"{PROMPT_TOKENS_UNIQUE}/"
    counted = (name for record in measured for name in record.metrics if name.startswith(prefix))
    for function in in_order(name.removeprefix(prefix) for name in counted):
        names = f"{PROMPT_TOKENS_COMPUTED}/{function}", f"{PROMPT_TOKENS_UNIQUE}/{function}"
        sums = [
            [math.fsum(record.metrics.get(name, 0.0) for record in records) for name in names]
            for records in (measured, predicted)
        ]
        if all(unique for _, unique in sums):
            of_measured, of_predicted = (computed / unique for computed, unique in sums)
            yield PromptTokens(function, of_measured, of_predicted)


def _predicted_s(
    record: StepRecord,
    simulated: Trace,
    latency: LatencyFile,
    batch: RolloutBatch,
    cores: float | None,
    overhead_s: float,
) -> dict[str, float]:
    """Return the predicted seconds of a step by stage.

    `overhead_s`: seconds in which no function works; they are not simulated.
    """
    # Per-token outputs are predicted from their fitted lines, below; the functions that compute them may also learn.
    others = [call for call in simulated.invocations if call.work is not Work.LOGPROBS or not latency.columns]
    times = step_times(record, simulated.invocations)
    phases_s = step_times(record, others).phases_s
    seconds = {str(stage): phases_s[stage] for stage in STAGES}
    late_s = latency.call_s
    if cores is not None:  # each simulated engine has a core; the machine may have fewer, shared with the helpers
        alone_s = drawn_s(record.step, simulated.invocations)
        late_s += shared_s(alone_s, latency.helper_cores, cores) - max(alone_s)
    seconds[Phase.GENERATION] += late_s
    # The simulator joins calls that follow each other closely; recorded calls have pauses between them.
    seconds[Phase.SCORING] = latency.group_s * batch.groups
    fed = int(batch.prompt_tokens[batch.group].sum() + batch.response_tokens.sum())
    for name, line in latency.columns.items():
        passes = [c for c in simulated.invocations if c.work is Work.LOGPROBS and c.function == name]
        tokens = fed - sum(call.cached_tokens for call in passes if call.step == record.step)
        seconds[column_phase(name)] += line.fixed_s * batch.groups + line.token_s * tokens
    return {**seconds, WALL: times.wall_s + late_s + overhead_s}


def _usd(trace: Trace, records: Sequence[StepRecord], prices: PriceBook) -> float:
    """Return the cost of the holdings during these steps."""
    spans = union((record.start_s, record.end_s) for record in records)
    return prices.cost_usd(
        replace(holding, start_s=low, end_s=high)
        for holding in trace.holdings
        for low, high in clip(spans, holding.start_s, holding.end_s)
    )
