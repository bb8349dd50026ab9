"""The response lengths of a run, step by step: read from its trace, and given to a predictor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rlhfless.records import FinishReason
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.lengths.predictor import LengthPredictor


@dataclass(frozen=True, slots=True)
class StepLengths:
    """The samples of one step."""

    step: int
    rollouts: tuple[TracedRollout, ...]

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rollout.prompt_id for rollout in self.rollouts))

    @property
    def samples_per_prompt(self) -> int:
        return 1 + max(rollout.sample_index for rollout in self.rollouts)

    def begin(self, predictor: LengthPredictor) -> None:
        predictor.step_began(self.step, self.prompt_ids, self.samples_per_prompt)

    def tell(self, predictor: LengthPredictor, until_s: float = float("inf")) -> None:
        """The state at `until_s` (unix time). A sample still running is assumed to draw its tokens at an even pace."""
        for rollout in self.rollouts:
            name, index, tokens = rollout.prompt_id, rollout.sample_index, rollout.response_tokens
            if rollout.finished_s <= until_s:
                truncated = rollout.finish_reason is not FinishReason.STOP
                predictor.finished(self.step, name, index, tokens, truncated=truncated)
            elif rollout.started_s < until_s:
                share = (until_s - rollout.started_s) / (rollout.finished_s - rollout.started_s)
                predictor.progress(self.step, name, index, int(share * tokens))


def steps_of(trace: Trace) -> list[StepLengths]:
    """The steps of a trace that have rollouts, in order."""
    ordered = sorted(trace.rollouts, key=lambda rollout: rollout.step)
    return [StepLengths(step, tuple(group)) for step, group in groupby(ordered, key=lambda rollout: rollout.step)]


def max_tokens_of(trace: Trace) -> int:
    """The max_tokens of a trace's responses. Raises TraceError if its spec does not say."""
    try:
        return int(trace.meta.spec["generation"]["max_tokens"])
    except (KeyError, TypeError) as error:
        raise TraceError(
            f"the spec in the trace of {trace.meta.run_id} has no generation.max_tokens, without which a "
            "truncated response cannot be told; restore meta.json from a copy of the run"
        ) from error


def predictor_of(trace: Trace) -> LengthPredictor:
    """The predictor of a run that is resumed: it has seen all rollouts of the run's trace.

    Raises TraceError if the trace does not say what max_tokens was.
    """
    predictor = LengthPredictor(max_tokens_of(trace))
    for lengths in steps_of(trace):
        lengths.begin(predictor)
        lengths.tell(predictor)
        predictor.step_ended(lengths.step)
    return predictor
