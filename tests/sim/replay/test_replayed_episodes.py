"""A recorded run of episodes, scored by their environment, whose waits are known: it is read, fitted and replayed."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fakes import recorded_run as recorded
from fakes.naive_engine import NaiveEngine, Sequence
from fakes.tiny_scenario import batch_of, play
from rlhfless.records import Episode, EpisodeStatus, EpisodeTurn, FinishReason, FunctionName, Rollout, Score, Work
from rlhfless.records.episodes import EpisodeCall
from rlhfless.records.traces import TraceMeta, TraceWriter, read_trace
from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.policies import make_policy
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.replay import replay
from rlhfless.sim.samples import EpisodeTurns, RolloutBatch
from rlhfless.sim.setup import ServiceShape
from rlhfless.sim.workloads.recorded import read_runtime

STEPS, OPENING, WAIT_S = 6, 9, 1.5


def episodes(step: int) -> RolloutBatch:
    """Eight groups of two samples with one to four turns."""
    random = np.random.default_rng(step)
    count = random.integers(1, 5, 16)
    own, given = random.integers(5, 60, count.sum()), random.integers(1, 6, count.sum())
    given[np.cumsum(count) - 1] = 0
    ends = np.concatenate([np.cumsum(part) for part in np.split(own + given, np.cumsum(count)[:-1])])
    totals = ends[np.cumsum(count) - 1].reshape(8, 2).tolist()
    turns = EpisodeTurns(count, np.full(16, OPENING), ends - given, given, np.full(len(own), WAIT_S), np.zeros(16))
    return replace(batch_of([(7, lengths) for lengths in totals]), step=step, turns=turns)


def sequences_of(batch: RolloutBatch, at_s: float) -> list[Sequence]:
    turns = batch.turns
    assert turns is not None
    found = []
    for sample, first in enumerate(turns.first.tolist()):
        rows = range(first, first + int(turns.count[sample]))
        left = deque((int(turns.given[a]), float(turns.wait_s[a]), int(turns.end[b])) for a, b in pairwise(rows))
        left.append((0, WAIT_S, 0))
        group, opening = int(batch.group[sample]), int(turns.opening[sample])
        prompt, end = int(batch.prompt_tokens[group]), int(turns.end[first])
        found.append(Sequence(sample, group, prompt, end, opening=opening, turns=left, arrival_s=at_s))
    return found


def rollout_of(batch: RolloutBatch, sequence: Sequence, actor: str) -> Rollout:
    turns, sample = batch.turns, sequence.sample
    assert turns is not None
    first = int(turns.first[sample])
    length = int(batch.response_tokens[sample])
    told, calls, start = [], [], 0
    spans = [(recorded.EPOCH_S + begin_s, recorded.EPOCH_S + end_s) for begin_s, end_s in sequence.spans]
    for number, (begin_s, end_s) in enumerate(spans):
        end = int(turns.end[first + number])
        told.append(EpisodeTurn(start, end, 0, "stop", "", "text", begin_s, end_s))
        calls.append(EpisodeCall(number + 1, number, "", "", "result", "", None, False, WAIT_S))
        start = end + int(turns.given[first + number])
    opening = (0,) * (sequence.prompt + sequence.opening)
    episode = Episode(opening, tuple(told), tuple(calls), EpisodeStatus.DONE, 1.0, "game", "")
    name, index = batch.prompt_ids[sequence.group], sample % 2
    tokens, logprobs = np.zeros(length, np.int32), np.zeros(length, np.float32)
    ends = spans[0][0], spans[-1][1] + WAIT_S, 0
    return Rollout(name, index, 0, tokens, logprobs, "", FinishReason.STOP, (), actor, *ends, episode=episode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose times of turns are those of the naive engine."""
    folder, setup = tmp_path_factory.mktemp("episodes"), recorded._setup(1)
    answers = ServiceShape(setup.services[0].slot_setup, FunctionName.ENVIRONMENT, None, 0.0, 0.0)
    setup = replace(setup, services=(answers,), max_tokens=400)
    batches = [episodes(step) for step in range(1, STEPS + 1)]
    trace, _ = play(setup, batches, make_policy("static"), load_price_book())
    spec = recorded._spec(None)
    meta = TraceMeta(
        "game", 1, load_price_book().snapshot(), spec | {"generation": {**spec["generation"], "max_tokens": 400}}, {}
    )
    with TraceWriter(folder, meta, record_tokens=False) as writer:
        for holding in trace.holdings:
            writer.add(recorded._later(holding))
        for call in trace.invocations:
            writer.add(recorded._later(recorded._told(call, batches)))
        for batch, step in zip(batches, trace.steps, strict=True):
            (call,) = (row for row in trace.invocations if row.step == batch.step and row.work is Work.GENERATE)
            naive = NaiveEngine(setup.actors[0].engine, recorded.ENGINE, now_s=call.start_s)
            sequences = sequences_of(batch, call.start_s)
            naive.queue.extend(sequences)
            naive.advance(float("inf"))
            assert max(naive.finish_s.values()) == pytest.approx(call.end_s, abs=1e-6)
            for sequence in sequences:
                writer.add_rollout(batch.step, rollout_of(batch, sequence, call.replica), Score(1.0, {}), 7)
            start_s, end_s = recorded.EPOCH_S + step.start_s, recorded.EPOCH_S + step.end_s
            writer.add(replace(step, start_s=start_s, end_s=end_s))
    return folder


def test_turns_and_waits_are_read(folder: Path) -> None:
    for batch in read_runtime(folder):
        expected = episodes(batch.step)
        assert batch.turns is not None
        assert expected.turns is not None
        assert (batch.turns.opening == 0).all()  # siblings have the same opening, which is the prompt of the group
        assert batch.prompt_tokens.tolist() == [7 + OPENING] * 8
        assert batch.response_tokens.tolist() == expected.response_tokens.tolist()
        for name in ("count", "end", "given"):
            assert getattr(batch.turns, name).tolist() == getattr(expected.turns, name).tolist()
        assert batch.turns.wait_s == pytest.approx(expected.turns.wait_s, abs=1e-6)


def test_the_engine_is_fitted_to_turns(folder: Path) -> None:
    """A fit to whole episodes would take their waits for the time of tokens, several times too long."""
    engine = calibrate([read_trace(folder)]).engine
    assert decode_s(engine, 8, 8 * 40, 10) == pytest.approx(decode_s(recorded.ENGINE, 8, 8 * 40, 10), rel=0.05)


def test_a_run_scored_by_its_environment_is_replayed(folder: Path) -> None:
    again = replay(read_trace(folder), read_runtime(folder))
    errors = {error.stage: error for error in again.errors}
    assert "scoring" not in errors
    assert errors["generation"].measured_s > 2 * WAIT_S
    assert errors["generation"].error < 0.02
    assert errors["step"].error < 0.02
    assert again.predicted_usd == pytest.approx(again.measured_usd, rel=0.03)
