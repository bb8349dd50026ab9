"""How forecasts are judged: by hand, on a trace of known lengths, and on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fakes.builders import traced
from rlhfless.cli import main
from rlhfless.records import FinishReason, Rollout, Score
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace, TracedRollout, TraceMeta, TraceWriter
from rlhfless.scaling.lengths import QUANTILE_LEVELS
from rlhfless.scaling.lengths.quality import score_forecasts
from rlhfless.scaling.lengths.recorded import pinball, samples_at, spearman

MAX_TOKENS = 512
META = TraceMeta("known", 1, {}, {"generation": {"max_tokens": MAX_TOKENS}}, {})


def rollout(step: int, prompt_id: str, index: int, tokens: int) -> TracedRollout:
    """Begins with its step, at 1000 s x step, and draws a token every 10 ms."""
    reason = FinishReason.LENGTH if tokens >= MAX_TOKENS else FinishReason.STOP
    times = {"started_s": 1000.0 * step, "finished_s": 1000.0 * step + tokens / 100}
    return traced(step, prompt_id, index, tokens=tokens, reason=reason, **times)


def known_trace(steps: int = 12) -> Trace:
    """Sixteen prompts whose median lengths go from 20 to 400, four samples each, seen in every step."""
    draw = np.random.default_rng(0)
    medians = np.geomspace(20, 400, 16)
    return Trace(
        META,
        rollouts=tuple(
            rollout(step, f"p{row}", index, int(np.clip(median * np.exp(0.3 * draw.standard_normal()), 1, MAX_TOKENS)))
            for step in range(1, steps + 1)
            for row, median in enumerate(medians)
            for index in range(4)
        ),
    )


def test_pinball_by_hand() -> None:
    quantiles = np.full((1, len(QUANTILE_LEVELS)), 100.0)
    # 10 too low costs level x 10, 10 too high costs (1 - level) x 10.
    assert pinball(quantiles, np.array([110.0]))[0] == pytest.approx(10 * QUANTILE_LEVELS)
    assert pinball(quantiles, np.array([90.0]))[0] == pytest.approx(10 * (1 - QUANTILE_LEVELS))


def test_spearman_by_hand() -> None:
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 900])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5 / 4, variances 4.5 / 4 and 5 / 4.
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4])) == pytest.approx((4.5 / 5) ** 0.5)
    assert spearman(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) is None


def test_forecasts_beat_both_baselines_on_a_known_trace() -> None:
    run_mean, last, ours, half = score_forecasts(known_trace())
    assert [score.samples for score in (run_mean, last, ours)] == [11 * 64] * 3
    assert run_mean.rank_correlation is None
    assert run_mean.coverage is None
    assert ours.pinball_tokens < last.pinball_tokens < run_mean.pinball_tokens
    assert last.rank_correlation is not None
    assert ours.rank_correlation is not None
    assert ours.rank_correlation > 0.85
    assert ours.coverage is not None
    inner = (QUANTILE_LEVELS >= 0.1) & (QUANTILE_LEVELS <= 0.9)
    assert ours.coverage[inner] == pytest.approx(QUANTILE_LEVELS[inner], abs=0.08)
    assert 11 * 28 <= half.samples <= 11 * 32  # those that end just then have ended


def test_the_state_of_a_recorded_step_at_a_time() -> None:
    # A token every 10 ms: after 1.005 s the first has ended, and the others have drawn 100 tokens.
    rollouts = [rollout(1, "p", 0, 80), rollout(1, "p", 1, 400), rollout(1, "q", 0, MAX_TOKENS)]
    halfway, over = samples_at(rollouts, 1001.005), samples_at(rollouts)
    assert (halfway.prompt_ids, halfway.prompt.tolist()) == (("p", "q"), [0, 0, 1])
    assert halfway.tokens.tolist() == [80, 100, 100]
    assert halfway.ended.tolist() == [True, False, False]
    assert not halfway.truncated.any()
    assert over.tokens.tolist() == [80, 400, MAX_TOKENS]
    assert (over.ended.all(), over.truncated.tolist()) == (True, [False, False, True])


def test_a_sample_that_was_dropped_is_not_compared() -> None:
    trace = known_trace(2)
    fewer = Trace(META, rollouts=trace.rollouts[:-1])
    assert [score.samples for score in score_forecasts(fewer)[:3]] == [63] * 3


def test_a_trace_that_cannot_be_judged() -> None:
    with pytest.raises(TraceError, match="rollouts of 1 steps; forecasts need 2"):
        score_forecasts(known_trace(1))
    with pytest.raises(TraceError, match=r"no generation\.max_tokens"):
        score_forecasts(replace(known_trace(), meta=TraceMeta("old", 1, {}, {}, {})))


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", META, record_tokens=False) as writer:
        for row in known_trace(3).rollouts:
            drawn = np.arange(row.response_tokens), np.zeros(row.response_tokens, np.float32)
            ends = row.finish_reason, (), "a", row.started_s, row.finished_s
            sample = Rollout(row.prompt_id, row.sample_index, 0, *drawn, "", *ends)
            writer.add_rollout(row.step, sample, Score(0.0, {}), 10)
    result = CliRunner().invoke(main.app, ["trace", "lengths", str(tmp_path)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "known"
    assert lines[2].split() == ["response", "lengths", "samples", "rank", "corr", "pinball", "p10", "p50", "p90", "p99"]
    assert lines[3].startswith("mean of the run            128          -")
    assert [line[:22].strip() for line in lines[4:7]] == ["prompt's last visit", "forecast", "forecast at half time"]
