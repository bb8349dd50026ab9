"""Where batches come from: the formats, the rows that are refused, and what the generators promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fakes.builders import drawn
from rlhfless.records import Score
from rlhfless.records.traces import TraceMeta, TraceWriter
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.workloads.recorded import (
    WorkloadError,
    WorkloadRequest,
    batches_of,
    read_azure,
    read_mooncake,
    read_runtime,
)
from rlhfless.sim.workloads.synthetic import BimodalLengths, LognormalLengths, SyntheticWorkload

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
MOONCAKE = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
PUBLIC = Path("/work/shared/data")


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_good_rows(tmp_path: Path) -> None:
    assert read_azure(written(tmp_path, AZURE)) == [WorkloadRequest("row-2", 374, 44)]
    assert read_mooncake(written(tmp_path, MOONCAKE)) == [WorkloadRequest("row-1", 6758, 500)]


@pytest.mark.parametrize(
    ("reader", "text", "reason"),
    [
        (read_azure, "a,b\n", "row 1: the header is 'a,b'"),
        (read_azure, AZURE + "2023,1\n", "row 3: it has 2 fields, not 3"),
        (read_azure, AZURE + "2023,x,1\n", "row 3: ContextTokens is 'x', not a whole number"),
        (read_azure, AZURE + "\n2023,5,0\n", "row 4: GeneratedTokens is 0, less than 1"),
        (read_mooncake, MOONCAKE + "{\n", "row 2: it is not JSON"),
        (read_mooncake, MOONCAKE + "[" * 100_000 + "\n", "row 2: it is not JSON (it is nested too deeply)"),
        (read_mooncake, "[1]\n", "row 1: it is a list, not an object"),
        (read_mooncake, '{"input_length": 1, "hash_ids": []}\n', "row 1: it has no output_length"),
        (read_mooncake, MOONCAKE.replace("500", "1.5"), "row 1: output_length is 1.5, not a whole number"),
        (read_mooncake, MOONCAKE.replace("[0, 1]", "3"), "row 1: hash_ids is a int, not a list"),
    ],
)
def test_bad_rows_are_refused(
    tmp_path: Path, reader: Callable[[Path], list[WorkloadRequest]], text: str, reason: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(WorkloadError) as refused:
        reader(path)
    assert str(refused.value).startswith(f"{path}, {reason}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="nowhere cannot be read"):
        read_mooncake(tmp_path / "nowhere")


def test_requests_become_batches() -> None:
    requests = [WorkloadRequest(f"r{i}", 10 + i, 100 + i) for i in range(10)]
    batches = batches_of(requests, prompts_per_step=4, samples_per_prompt=3, seed=0)
    assert [batch.prompt_ids for batch in batches] == [("r0", "r1", "r2", "r3"), ("r4", "r5", "r6", "r7")]
    assert batches[0].response_tokens[::3].tolist() == [100, 101, 102, 103]  # the first sample is the trace's own
    assert set(batches[0].response_tokens.tolist()) <= {100, 101, 102, 103}
    with pytest.raises(ValueError, match="10 requests, and a step takes 11"):
        batches_of(requests, prompts_per_step=11, samples_per_prompt=1, seed=0)


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public traces are not here")
def test_public_traces() -> None:
    conversations = read_azure(PUBLIC / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv")
    mooncake = read_mooncake(PUBLIC / "mooncake-fast25" / "conversation_trace.jsonl")
    assert conversations[0] == WorkloadRequest("row-2", 374, 44)
    assert len(mooncake) == 12_031


def trace_of(folder: Path, rows: list[tuple[int, str, int, int, int]]) -> Path:
    """A trace from rows of step, prompt, sample, response tokens, prompt tokens."""
    with TraceWriter(folder, TraceMeta("demo", 1, {}, {}, {}), record_tokens=False) as writer:
        for step, prompt_id, sample_index, response, prompt in rows:
            writer.add_rollout(step, drawn(prompt_id, sample_index, [0] * response), Score(0.0, {}), prompt)
    return folder


def test_the_runtime_s_own_traces(tmp_path: Path) -> None:
    rows = [(1, "b", 1, 7, 20), (1, "a", 0, 5, 10), (1, "b", 0, 6, 20), (2, "a", 0, 9, 10)]
    first, second = read_runtime(trace_of(tmp_path / "trace", rows))
    assert first.prompt_ids == ("a", "b")
    assert (first.prompt_tokens.tolist(), first.group.tolist()) == ([10, 20], [0, 1, 1])
    assert first.response_tokens.tolist() == [5, 6, 7]  # siblings in the order of their sample_index
    assert (second.step, second.response_tokens.tolist()) == (2, [9])


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ((1, "a", 0, 5, 10), "was there before"),
        ((1, "a", 1, 5, 11), "prompt_tokens is 11, and 10 for its sibling"),
        ((1, "b", 0, 0, 10), "response_tokens 0; both must be at least 1"),
    ],
)
def test_bad_rows_of_a_runtime_trace(tmp_path: Path, last: tuple[int, str, int, int, int], reason: str) -> None:
    with pytest.raises(WorkloadError, match=rf"rollouts, row 2 \(step 1, .*{reason}"):
        read_runtime(trace_of(tmp_path / "trace", [(1, "a", 0, 5, 10), last]))


LENGTHS = LognormalLengths(median_tokens=500, spread=0.8, persistence=0.7)
WORK = SyntheticWorkload(LENGTHS, 64, 32, 8, 100, 4096, drift_per_step=0.0, seed=3)


def log_means(batch: RolloutBatch) -> dict[str, float]:
    means = np.bincount(batch.group, np.log(batch.response_tokens)) / np.bincount(batch.group)
    return dict(zip(batch.prompt_ids, means.tolist(), strict=True))


def test_difficulty_persists_across_epochs() -> None:
    batches = list(WORK.batches(4))  # two epochs
    first, second = ({**log_means(batches[i]), **log_means(batches[i + 1])} for i in (0, 2))
    assert sorted(first) == sorted(second)
    names = sorted(first)
    history = np.corrcoef([first[name] for name in names], [second[name] for name in names])[0, 1]
    # Of a mean over 8 samples 0.49 / (0.49 + 0.51 / 8) = 0.88 of the variance is the prompt's own.
    assert history > 0.7


def test_a_step_does_not_depend_on_how_many_are_drawn() -> None:
    short, long = list(WORK.batches(3)), list(WORK.batches(9))
    for left, right in zip(short, long, strict=False):
        assert left.prompt_ids == right.prompt_ids
        assert left.response_tokens.tolist() == right.response_tokens.tolist()


def test_drift_and_truncation() -> None:
    drifting = dataclasses.replace(WORK, drift_per_step=0.5)
    medians = [float(np.median(batch.response_tokens)) for batch in drifting.batches(8)]
    assert medians[-1] > 4 * medians[0]
    assert max(batch.response_tokens.max() for batch in drifting.batches(8)) == 4096


def test_two_kinds_of_answer() -> None:
    kinds = BimodalLengths(LognormalLengths(100, 0.1, 0.0), LognormalLengths(10_000, 0.1, 0.5), long_share=0.25)
    lengths = kinds.draw(np.random.default_rng(0).standard_normal(20_000), 0.0, np.random.default_rng(1))
    assert np.mean(lengths > 1000) == pytest.approx(0.25, abs=0.02)
    assert not np.any((lengths > 300) & (lengths < 3000))


def test_batches_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="a length is at least 1"):
        RolloutBatch(1, ("a",), np.array([3]), np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="group must ascend"):
        RolloutBatch(1, ("a", "b"), np.array([3, 3]), np.array([1, 0]), np.array([1, 1]))
    with pytest.raises(ValueError, match=r"each of 0 \.\. 1"):
        RolloutBatch(1, ("a", "b"), np.array([3, 3]), np.array([0, 0]), np.array([1, 1]))
