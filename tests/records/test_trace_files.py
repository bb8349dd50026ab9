"""The trace on disk: what is written is what is read, and what is wrong is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.repository import ROOT
from rlhfless.records import (
    Decision,
    FinishReason,
    FunctionName,
    Holding,
    Invocation,
    Prompt,
    ReplicaState,
    Rollout,
    Score,
    StepRecord,
    VersionSpan,
    Work,
    traces,
)
from rlhfless.records.schema import NAME_KEY, TABLES, TRACE_VERSION, VERSION_KEY, TraceError
from rlhfless.records.traces import TraceMeta, TraceWriter, newest_responses, read_tables, read_trace
from rlhfless.util.host import describe_machine

META = TraceMeta(
    run_id="demo",
    attempt=1,
    prices={"cpu_kind": "cpu-core"},
    spec={"steps": 2, "rewards": [{"type": "exact_match"}]},
    machine=describe_machine(),
)
HOLDING = Holding(
    FunctionName.GENERATION, "generation-0", "a1", "cpu-0", "cpu-core", 0.5, ReplicaState.SERVING, 10.25, 20.5
)
INVOCATION = Invocation(
    FunctionName.GENERATION,
    "generation-0",
    "a1",
    Work.GENERATE,
    1,
    11.0,
    19.0,
    30,
    5,
    16,
    1,
    0,
    "demo/1/0/ab",
    drafted=(5, 4),
    accepted=(3, 1),
    draft_s=0.25,
    verify_s=1.5,
)
ROLLOUT = Rollout(
    prompt_id="p1",
    sample_index=3,
    seed=2**62 + 1,
    token_ids=np.array([5, 151_000, 7], dtype=np.int64),
    logprobs=np.array([-0.5, -1.25, 0.0], dtype=np.float32),
    text="<think>8 x 7</think> 56\n<|im_end|>",
    finish_reason=FinishReason.STOP,
    version_spans=(VersionSpan("demo/1/0/ab", 0, 2), VersionSpan("demo/1/1/cd", 2, 3)),
    actor="generation-0",
    started_s=11.5,
    finished_s=18.5,
    cached_tokens=16,
)
PROMPT = Prompt("p1", (3, 9), "<|im_start|>user\n8 x 7?", {"answer": "56", "at": date(2026, 11, 28)}, source="sums")
SCORE = Score(0.75, {"exact_match": 1.0, "length_penalty": -0.25}, {"judge": "no answer in 30 s"})
STEP = StepRecord(1, 10.0, 21.0, {"reward_mean": 0.75, "step_s": 11.0})
DECISION = Decision(1, 10.5, "plan", "2 actors", {"tokens": 10, "gap_s": 0.5, "warm": True, "hold": "auto"})


def write_one_of_each(folder: Path, record_tokens: bool = False, meta: TraceMeta = META) -> None:
    with TraceWriter(folder, meta, record_tokens) as writer:
        writer.add(HOLDING)
        writer.add(INVOCATION)
        writer.add_prompt(PROMPT)
        writer.add_rollout(1, ROLLOUT, SCORE, prompt_tokens=30)
        writer.add_prompt(PROMPT)
        writer.add(STEP)
        writer.add(DECISION)
        writer.flush(1)


def test_a_trace_has_no_secrets_of_the_spec(tmp_path):
    rewards = [{"type": "python", "kwargs": {"api_key": "hunter2"}}, {"type": "http", "url": "http://a/?token=hunter2"}]
    with TraceWriter(tmp_path, replace(META, spec={"rewards": rewards}), record_tokens=False):
        pass
    assert "hunter2" not in (tmp_path / "meta.json").read_text()
    assert read_trace(tmp_path).meta.spec["rewards"][1]["url"] == "http://a/?token=***"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)
    trace = read_trace(tmp_path)
    assert trace.meta == META
    assert trace.holdings == (HOLDING,)
    assert trace.invocations == (INVOCATION,)
    assert list(newest_responses(tmp_path, 100)) == []  # tokens were not recorded
    assert trace.steps == (STEP,)
    assert trace.decisions == (DECISION,)
    (row,) = trace.rollouts
    assert (row.step, row.prompt_id, row.sample_index, row.seed) == (1, "p1", 3, 2**62 + 1)
    assert (row.prompt_tokens, row.response_tokens, row.cached_tokens) == (30, 3, 16)
    assert (row.reward, row.reward_parts) == (0.75, {"exact_match": 1.0, "length_penalty": -0.25})
    assert row.reward_failures == {"judge": "no answer in 30 s"}
    assert row.finish_reason is FinishReason.STOP
    assert row.version_spans == ROLLOUT.version_spans
    assert (row.actor, row.started_s, row.finished_s) == ("generation-0", 11.5, 18.5)
    assert (row.token_ids, row.logprobs, row.text) == (None, None, None)
    assert trace.prompts == ()
    assert isinstance(trace.holdings[0].state, ReplicaState)
    assert isinstance(trace.invocations[0].work, Work)


def test_decision_inputs_keep_their_types(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)
    inputs = read_trace(tmp_path).decisions[0].inputs
    assert {name: type(value) for name, value in inputs.items()} == {
        "tokens": int,
        "gap_s": float,
        "warm": bool,
        "hold": str,
    }


def test_tokens_are_kept_only_when_asked_for(tmp_path: Path) -> None:
    write_one_of_each(tmp_path, record_tokens=True)
    (row,) = read_trace(tmp_path).rollouts
    assert row.token_ids == (5, 151_000, 7)
    assert row.logprobs == (-0.5, -1.25, 0.0)


def test_texts_are_kept_with_tokens_and_each_prompt_once(tmp_path: Path) -> None:
    write_one_of_each(tmp_path, record_tokens=True)
    trace = read_trace(tmp_path)
    assert trace.rollouts[0].text == "<think>8 x 7</think> 56\n<|im_end|>"
    (prompt,) = trace.prompts
    assert (prompt.prompt_id, prompt.source, prompt.token_ids) == ("p1", "sums", (3, 9))
    assert prompt.text == "<|im_start|>user\n8 x 7?"
    assert prompt.columns == {"answer": "56", "at": "2026-11-28"}
    brief = read_trace(tmp_path, tokens=False)
    assert (brief.prompts, brief.rollouts[0].text, brief.rollouts[0].token_ids) == ((), None, None)


def test_every_flush_is_a_part_and_order_is_kept(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, META, record_tokens=False) as writer:
        for step in range(1, 13):
            writer.add(StepRecord(step, step, step + 1, {}))
            writer.flush(step)
            writer.flush(step)  # nothing new: no file
        writer.add(StepRecord(13, 13, 14, {}))  # left to close()
    assert len(list((tmp_path / "steps").iterdir())) == 13
    assert list((tmp_path / "rollouts").iterdir()) == []
    assert [step.step for step in read_trace(tmp_path).steps] == list(range(1, 14))


def test_what_was_flushed_outlives_the_writer_and_torn_files_are_ignored(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, META, record_tokens=False)
    writer.add(STEP)
    writer.flush(1)
    writer.add(STEP)  # never flushed: the process died here
    (tmp_path / "steps" / "attempt001-step000002-000009.parquet.tmp").write_bytes(b"PAR1 torn")
    assert read_trace(tmp_path).steps == (STEP,)


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, META, record_tokens=False)
    writer.close()
    writer.close()
    with pytest.raises(TraceError, match="closed"):
        writer.add(STEP)


def test_a_later_attempt_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)
    second = TraceMeta("demo", 2, META.prices, META.spec, META.machine)
    write_one_of_each(tmp_path, meta=second)
    trace = read_trace(tmp_path)
    assert trace.meta.attempt == 2
    assert trace.holdings == (HOLDING, HOLDING)


@pytest.mark.parametrize(
    ("run_id", "attempt", "message"),
    [("demo", 1, "raise the attempt"), ("other", 9, "own folder")],
)
def test_a_folder_of_another_run_or_attempt_is_refused(tmp_path: Path, run_id: str, attempt: int, message: str) -> None:
    write_one_of_each(tmp_path)
    with pytest.raises(TraceError, match=message):
        TraceWriter(tmp_path, TraceMeta(run_id, attempt, {}, {}, {}), record_tokens=False)


def test_no_trace_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"meta\.json does not exist"):
        read_trace(tmp_path / "nothing")


@pytest.mark.parametrize("version", [TRACE_VERSION + 1, None, "1"])
def test_unknown_version_of_meta_is_refused(tmp_path: Path, version: object) -> None:
    write_one_of_each(tmp_path)
    path = tmp_path / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trace_version": version}))
    with pytest.raises(TraceError, match=f"trace version {version}, .* knows 2, 3, 4, 5, 6, 7 and {TRACE_VERSION}"):
        read_trace(tmp_path)


def rewrite(tmp_path: Path, table: str, change: object) -> Path:
    (path,) = (tmp_path / table).iterdir()
    pq.write_table(change(pq.read_table(path)), path)  # type: ignore[operator]
    return path


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"1" * 5000 + b"}"])
def test_meta_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(TraceError, match=r"is not JSON .* restore it from a copy of the run"):
        read_trace(tmp_path)


def test_the_newest_responses_come_first_and_only_as_many_tokens_as_asked_for(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, META, record_tokens=True) as writer:
        for step, tokens in enumerate(([1, 2, 3], [4], [5, 6], [7, 8])):
            rollout = replace(ROLLOUT, prompt_id=f"p{step}", token_ids=np.array(tokens))
            writer.add_rollout(step, replace(rollout, logprobs=np.zeros(len(tokens), np.float32)), SCORE, 30)
            if step in (1, 3):
                writer.flush(step)
    found = [(prompt_id, tokens.tolist()) for prompt_id, tokens in newest_responses(tmp_path, 6)]
    assert found == [("p3", [7, 8]), ("p2", [5, 6]), ("p1", [4])]
    assert list(newest_responses(tmp_path / "nothing", 6)) == []


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        (2, ["evicted_tokens", "drafted", "accepted", "draft_s", "verify_s"]),
        (3, ["drafted", "accepted", "draft_s", "verify_s"]),
        (4, ["draft_s", "verify_s"]),
        (5, []),
    ],
)
def test_a_trace_of_an_earlier_version_is_read_and_continued(tmp_path: Path, version: int, lacks: list[str]) -> None:
    """As it was written then: without columns that came later. A run of then goes on in the same folder."""

    def older(lacks: list[str], table: pa.Table) -> pa.Table:
        metadata = table.schema.metadata | {VERSION_KEY: str(version).encode()}
        return table.drop_columns(lacks).replace_schema_metadata(metadata)

    write_one_of_each(tmp_path)
    shutil.rmtree(tmp_path / "prompts")
    old = INVOCATION if version == 5 else replace(INVOCATION, draft_s=0.0, verify_s=0.0)
    if "drafted" in lacks:
        old = replace(old, drafted=(), accepted=())
    before = replace(read_trace(tmp_path), invocations=(old,))
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"trace_version": version}))
    rewrite(tmp_path, "invocations", partial(older, lacks))
    rewrite(tmp_path, "rollouts", partial(older, ["text"]))
    assert read_trace(tmp_path) == before
    write_one_of_each(tmp_path, meta=replace(META, attempt=META.attempt + 1))
    assert read_trace(tmp_path).invocations == (old, INVOCATION)


def test_unknown_version_of_a_part_is_refused(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)
    metadata = {NAME_KEY: b"steps", VERSION_KEY: str(TRACE_VERSION + 1).encode()}
    path = rewrite(tmp_path, "steps", lambda table: table.replace_schema_metadata(metadata))
    with pytest.raises(TraceError, match=f"{path.name} has trace version {TRACE_VERSION + 1}"):
        read_trace(tmp_path)


@pytest.mark.parametrize(("table", "column"), [("holdings", "share"), ("rollouts", "version_spans")])
def test_a_missing_column_is_named_with_its_file(tmp_path: Path, table: str, column: str) -> None:
    write_one_of_each(tmp_path)
    path = rewrite(tmp_path, table, lambda content: content.drop_columns([column]))
    with pytest.raises(TraceError, match=f"{path.name} has no column '{column}'"):
        read_trace(tmp_path)


def test_a_mistyped_column_is_named_with_its_type(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)

    def as_text(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index("reward")
        return table.set_column(index, "reward", table["reward"].cast(pa.string()))

    rewrite(tmp_path, "rollouts", as_text)
    with pytest.raises(TraceError, match="column 'reward' is string; write it as double"):
        read_trace(tmp_path)


def test_a_part_in_the_wrong_folder_is_refused(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)
    (path,) = (tmp_path / "steps").iterdir()
    path.rename(tmp_path / "decisions" / "moved.parquet")
    with pytest.raises(TraceError, match="holds the table 'steps', not 'decisions'"):
        read_trace(tmp_path)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)
    (tmp_path / "steps" / "zero.parquet").write_bytes(b"")
    with pytest.raises(TraceError, match=r"zero\.parquet is not a Parquet file"):
        read_trace(tmp_path)


def test_a_step_that_is_read_is_whole_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service reads traces of runs that write them: here a step ends between the reading of any two tables."""
    with TraceWriter(tmp_path, META, False) as writer:
        begun = 0

        def step() -> None:
            nonlocal begun
            begun += 1
            writer.add_rollout(begun, ROLLOUT, SCORE, prompt_tokens=30)
            writer.add(replace(DECISION, step=begun))
            writer.add(replace(STEP, step=begun))
            writer.flush(begun)

        def read(folder: Path, name: str) -> pa.Table:
            found = read_table(folder, name)
            step()
            return found

        step()
        read_table = traces._read_table
        monkeypatch.setattr(traces, "_read_table", read)
        trace = read_trace(tmp_path)
        done = {record.step for record in trace.steps}
        assert done == {1}
        assert done <= {row.step for row in trace.rollouts}
        assert done <= {decision.step for decision in trace.decisions}


def test_tables_have_the_declared_columns(tmp_path: Path) -> None:
    write_one_of_each(tmp_path)
    tables = read_tables(tmp_path)
    assert {name: table.schema for name, table in tables.items()} == dict(TABLES)
    assert tables["rollouts"]["response_tokens"].to_pylist() == [3]


def test_every_column_is_documented() -> None:
    text = (ROOT / "docs" / "trace.md").read_text()
    for name, schema in TABLES.items():
        section = text.split(f"### {name}\n")[1].split("\n### ")[0]
        documented = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
        assert documented == schema.names
    assert f"version is {TRACE_VERSION}" in text


times = st.floats(0, 2e9)
names = st.text(max_size=8)
metrics = st.dictionaries(names, st.floats(allow_nan=False))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2**40), times, times, metrics), max_size=5), st.data())
def test_any_steps_survive_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, float, float, dict[str, float]]],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    records = [StepRecord(*row) for row in rows]
    with TraceWriter(folder, META, record_tokens=False) as writer:
        for record in records:
            writer.add(record)
            if data.draw(st.booleans()):
                writer.flush(record.step)
    # Parts sort by step first, then by the order of flushing.
    assert sorted(map(repr, read_trace(folder).steps)) == sorted(map(repr, records))
