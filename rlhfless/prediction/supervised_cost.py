"""Time and cost of a run that learns from written responses, before it starts.

Nothing is generated and no decisions are made during the run, so nothing is simulated. A step passes its tokens through
the learner and, for `dpo`, the tokens of new pairs through the reference, on devices held throughout:

    step_s = learn_s(tokens x epochs) + reference_s(tokens of new pairs) + fixed_s
    tokens = prompts_per_step x (1, or 2 of a pair) x mean tokens of prompt and response

The times come from an earlier run with the same number of ranks, or else from data sheets, as in the simulator.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from rlhfless.planning.memory_plan import Question, held_devices
from rlhfless.prediction.simulated import (
    MEASURED_FACTOR,
    PROMPT_TOKENS,
    Lengths,
    Predicted,
    band_text,
    banded,
    sheet_factor,
)
from rlhfless.prepare.examples import example_lengths
from rlhfless.records import FunctionName
from rlhfless.records.traces import Trace
from rlhfless.scaling.memory import without_head
from rlhfless.scaling.prices import SECONDS_PER_HOUR, load_price_book
from rlhfless.sim.replay.calibrate import LearningFit
from rlhfless.sim.replay.latency_file import LatencyFile, LineFit
from rlhfless.sim.scenarios.timing import FORWARD_OPERATIONS, learn_operations, operation_s, pass_operation_s
from rlhfless.sim.scenarios.work import LearnerTimingSpec
from rlhfless.spec import RunSpec
from rlhfless.spec.base import count_of
from rlhfless.spec.data import is_path
from rlhfless.spec.errors import InputError

log = logging.getLogger(__name__)

RESPONSE_TOKENS = 256
"""Mean written response if unknown: an assumption, like PROMPT_TOKENS; the band covers half and twice."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of a step's parts, as functions of tokens."""

    learn: LineFit
    reference: LineFit
    fixed_s: float
    """Additional seconds per step, independent of its size."""
    factor: float = MEASURED_FACTOR
    """Factor that widens the band."""

    @classmethod
    def of_sheet(cls, asked: Question) -> Seconds:
        """Return the seconds by the devices' data sheet, at the simulator's utilisation."""
        spec, timing = asked.spec, LearnerTimingSpec()
        shape = without_head(asked.shape) if spec.type == "reward_model" else asked.shape
        operations = learn_operations(spec.learner.recomputes, spec.model.lora is not None)
        devices = _devices(asked)
        learn_s = operations * operation_s(shape, asked.sheet, devices[FunctionName.LEARNER], timing)
        by = FunctionName.LEARNER if spec.learner_is_reference else FunctionName.REFERENCE
        reference_s = FORWARD_OPERATIONS * operation_s(shape, asked.sheet, devices[by], timing)
        pass_s = pass_operation_s(shape, asked.sheet, timing)
        learn = LineFit(fixed_s=operations * spec.epochs * pass_s, token_s=learn_s)
        reference = LineFit(fixed_s=FORWARD_OPERATIONS * pass_s, token_s=reference_s)
        return cls(learn, reference, timing.fixed_s, sheet_factor(asked.sheet.kind))

    @classmethod
    def measured(cls, asked: Question, latency: LatencyFile | LearningFit) -> Seconds:
        """Return the seconds measured on these devices, taking an unmeasured reference from the data sheet."""
        reference = latency.columns.get(FunctionName.REFERENCE, cls.of_sheet(asked).reference)
        return cls(latency.learn, reference, latency.driver_s)


def written(asked: Question, lengths: Lengths, latency: LatencyFile | LearningFit | None) -> Predicted:
    """Return time and cost of a run. Raises PriceError for devices without a price."""
    seconds = Seconds.of_sheet(asked) if latency is None else Seconds.measured(asked, latency)
    spec = asked.spec
    steps = [_step(asked, lengths, seconds, factor) for factor in lengths.factors]
    usd = [[_usd(asked, lengths, step)] for step in steps]
    work_s = steps[0]
    devices = _devices(asked)
    step_s = [[math.fsum(step.values())] for step in steps]
    return Predicted(
        banded(spec.steps, step_s, usd, seconds.factor, band_text(lengths, seconds.factor)),
        math.fsum(devices[name] * busy_s for name, busy_s in work_s.items() if name),
        spec.prompts_per_step * spec.sequences_per_prompt * lengths.mean_tokens,
        {str(name): busy_s / step_s[0][0] for name, busy_s in work_s.items() if name},
    )


def _devices(asked: Question) -> dict[FunctionName, int]:
    """Return the devices on which each function works: one per rank, except for CPU cores that ranks share."""
    spec = asked.spec
    ranks = {FunctionName.LEARNER: spec.learner.world_size, FunctionName.REFERENCE: count_of(spec.reference.ranks)}
    return {function: min(count, asked.learner_count) for function, count in ranks.items()}


def _step(asked: Question, lengths: Lengths, seconds: Seconds, factor: float) -> dict[FunctionName | None, float]:
    """Return the seconds of a mean step by function, with the key None for time in which no function works."""
    spec = asked.spec
    tokens = spec.prompts_per_step * spec.sequences_per_prompt * factor * (lengths.prompt_tokens + lengths.mean_tokens)
    work_s: dict[FunctionName | None, float] = {FunctionName.LEARNER: seconds.learn.at(tokens * spec.epochs)}
    if spec.needs_reference:
        function = FunctionName.LEARNER if spec.learner_is_reference else FunctionName.REFERENCE
        reference_s = _new_share(spec, lengths) * seconds.reference.at(tokens)
        work_s[function] = work_s.get(function, 0.0) + reference_s
    return work_s | {None: seconds.fixed_s}


def _new_share(spec: RunSpec, lengths: Lengths) -> float:
    """Return the share of the steps whose pairs are new: the reference computes each pair once."""
    return 1.0 if lengths.rows is None else min(lengths.rows / (spec.steps * spec.prompts_per_step), 1.0)


def _usd(asked: Question, lengths: Lengths, work_s: Mapping[FunctionName | None, float]) -> float:
    """Return the cost of a mean step. The reference releases its share once it has computed every pair."""
    spec = asked.spec
    price = load_price_book(spec.scaling.prices).device(asked.sheet.kind)
    by_function = held_devices(spec, asked.sheet.kind, asked.count)
    held = by_function[FunctionName.LEARNER] + _new_share(spec, lengths) * by_function.get(FunctionName.REFERENCE, 0.0)
    held = held if price.rented_by == "device" else asked.count
    return held * math.fsum(work_s.values()) * price.usd_per_hour / SECONDS_PER_HOUR


def written_lengths(spec: RunSpec, trace: Trace | None) -> Lengths:
    """Return the lengths of an earlier run, of the data if it is a file, or an assumption."""
    if trace is not None and trace.steps:
        means = [
            fmean(record.metrics[f"{part}_tokens_mean"] for record in trace.steps) for part in ("prompt", "response")
        ]
        return Lengths(0.0, means[1], 0.0, means[0], f"{len(trace.steps):,} steps of {trace.meta.run_id}", known=True)
    why = "the data is no file"
    if spec.data.path and is_path(spec.data.path) and os.path.isfile(spec.data.path):
        try:
            found = example_lengths(spec)
            source = f"{found.read:,} of the {found.rows:,} rows of {spec.data.path}"
            return Lengths(0.0, found.response_tokens, 0.0, found.prompt_tokens, source, known=True, rows=found.rows)
        except (InputError, OSError, ValueError) as error:
            why = str(error).splitlines()[-1].strip()
            log.info("data lengths could not be read; using defaults: %s", error)
    source = f"assumed: prompts of {PROMPT_TOKENS} and responses of {RESPONSE_TOKENS} tokens ({why})"
    return Lengths(0.0, RESPONSE_TOKENS, 0.0, PROMPT_TOKENS, source, known=False)
