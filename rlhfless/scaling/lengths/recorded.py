"""The samples of a recorded run, step by step, and the quality of forecasts for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from rlhfless.records import FinishReason
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.lengths.levels import QUANTILE_LEVELS, Array, StepSamples

Rollouts = Sequence[TracedRollout]


def steps_of(trace: Trace) -> list[Rollouts]:
    """Return the rollouts of each step that has any, in order; within a step, ordered by prompt and sample index."""
    ordered = sorted(trace.rollouts, key=lambda rollout: (rollout.step, rollout.prompt_id, rollout.sample_index))
    return [tuple(group) for _, group in groupby(ordered, key=lambda rollout: rollout.step)]


def samples_at(rollouts: Rollouts, at_s: float = float("inf")) -> StepSamples:
    """Return the state of a step's samples at `at_s` (unix time), assuming an even pace of generation."""
    prompt_ids = tuple(dict.fromkeys(rollout.prompt_id for rollout in rollouts))
    row = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
    prompt = np.array([row[rollout.prompt_id] for rollout in rollouts])
    tokens = np.array([rollout.response_tokens for rollout in rollouts])
    began_s, end_s = np.array([(rollout.started_s, rollout.finished_s) for rollout in rollouts]).T
    ended = end_s <= at_s
    generated = np.where(
        ended, tokens, tokens * np.clip((at_s - began_s) / np.maximum(end_s - began_s, 1e-9), 0.0, 1.0)
    )
    truncated = np.array([rollout.finish_reason is not FinishReason.STOP for rollout in rollouts])
    return StepSamples(prompt_ids, prompt, np.floor(generated), ended, ended & truncated)


def max_tokens_of(trace: Trace) -> int:
    """Return the max_tokens of a trace's responses. Raises TraceError if its spec lacks it."""
    try:
        return int(trace.meta.spec["generation"]["max_tokens"])
    except (KeyError, TypeError) as error:
        raise TraceError(
            f"the spec in the trace of {trace.meta.run_id} has no generation.max_tokens, without which a "
            "truncated response cannot be told; restore meta.json from a copy of the run"
        ) from error


def pinball(quantiles: Array, real: Array) -> Array:
    """Return the pinball loss [samples, Q] of quantiles [samples, Q] at QUANTILE_LEVELS, given `real` [samples]."""
    above = real[:, None] - quantiles
    return np.maximum(QUANTILE_LEVELS * above, (QUANTILE_LEVELS - 1) * above)


def spearman(first: Array, second: Array) -> float | None:
    """Return Spearman's rank correlation, with ties at their mean rank, or None if either is constant."""
    one, two = _ranks(first), _ranks(second)
    spread = float(np.sqrt(one.var() * two.var()))
    return float(((one - one.mean()) * (two - two.mean())).mean()) / spread if spread > 0 else None


def _ranks(values: Array) -> Array:
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[inverse])
