"""The trace of a run: its records as Parquet files, from which it is billed, explained and replayed.

    trace/
      meta.json                     run, attempt, price book and spec of the run, machine
      holdings/    <part>.parquet   one folder per table of rlhfless.records.schema
      invocations/ prompts/ rollouts/ steps/ decisions/

Each flush writes one part per table with new rows, under a temporary name, synced and renamed. A dead run loses at most
the records after its last flush. Nothing is rewritten except meta.json, by a later attempt; part names contain the
attempt. A repeated step appears twice in holdings and invocations, because it was paid for twice.

Texts and tokens are recorded only with `logging.record_tokens`, so that a trace can be shared. A writer must be used
from one thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, astuple, dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from rlhfless.records.ledger import (
    TRACE_FOLDER,
    Decision,
    Holding,
    Invocation,
    ReplicaState,
    StepRecord,
    Work,
)
from rlhfless.records.rollouts import FinishReason, IntArray, Prompt, Rollout, Score, VersionSpan
from rlhfless.records.schema import (
    RECORDED,
    TABLES,
    TRACE_VERSION,
    TraceError,
    check_version,
    read_part,
    write_part,
    write_whole,
)
from rlhfless.util.text import parsed_json, redacted, storable, storable_values

META_FILE = "meta.json"


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """The context of a run's records."""

    run_id: str
    attempt: int
    prices: Mapping[str, Any]
    """Snapshot of the price book (`PriceBook.snapshot()`), because a later edit must not change the bill."""
    spec: Mapping[str, Any]
    """The RunSpec as JSON values."""
    machine: Mapping[str, Any]
    """See rlhfless.util.host.describe_machine."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """One turn of an episode: response tokens [start, end)."""

    start: int
    end: int
    context_tokens: int
    """All tokens before it, with those of the prompt."""
    cached_tokens: int
    """Of its context, those from the prefix cache."""
    started_s: float  # unix time
    ended_s: float
    wait_s: float
    """Seconds of waiting for the answers to its calls."""


@dataclass(frozen=True, slots=True)
class TracedRollout:
    """A row of the table `rollouts`."""

    step: int
    prompt_id: str
    sample_index: int
    seed: int
    prompt_tokens: int
    response_tokens: int
    cached_tokens: int
    reward: float
    reward_parts: Mapping[str, float]
    reward_failures: Mapping[str, str]  # part to cause; usually empty
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    actor: str
    started_s: float  # unix time
    finished_s: float
    token_ids: tuple[int, ...] | None  # [response]; None unless tokens were recorded
    logprobs: tuple[float, ...] | None  # [response]; rollout logprobs
    text: str | None = None
    """The text that rewards saw; None unless tokens were recorded."""
    turns: int = 1
    environment_tokens: int = 0
    """Of the response, those that the environment wrote."""
    environment_s: float = 0.0
    """Seconds of waiting for the environment."""
    episode_status: str = ""
    """How the episode ended (EpisodeStatus); empty in a run without an environment."""
    episode: Mapping[str, Any] | None = None
    """Turns and calls (Episode.as_json); None unless tokens were recorded."""
    turn_spans: tuple[TurnSpan, ...] = ()
    """Empty in a run without an environment."""

    @property
    def requests(self) -> tuple[TracedRollout, ...]:
        """Its turns as responses of their own, each with its context as the prompt; without an episode, the rollout."""
        if not self.turn_spans:
            return (self,)
        return tuple(
            replace(
                self,
                prompt_tokens=turn.context_tokens,
                response_tokens=turn.end - turn.start,
                cached_tokens=turn.cached_tokens,
                started_s=turn.started_s,
                finished_s=turn.ended_s,
                turn_spans=(),
            )
            for turn in self.turn_spans
        )


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A row of the table `prompts`: a prompt as the policy saw it, with the columns for rewards."""

    prompt_id: str
    source: str
    """The name of its data set, if any."""
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    """Values that JSON lacks are strings."""


@dataclass(frozen=True, slots=True)
class Trace:
    """All records of a run, in the order in which they were written."""

    meta: TraceMeta
    holdings: tuple[Holding, ...] = ()
    invocations: tuple[Invocation, ...] = ()
    rollouts: tuple[TracedRollout, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    decisions: tuple[Decision, ...] = ()
    prompts: tuple[TracedPrompt, ...] = ()
    """Empty unless tokens were recorded. Each attempt writes its own rows."""


_TABLE = {Holding: "holdings", Invocation: "invocations", StepRecord: "steps", Decision: "decisions"}


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Appends to the trace in `folder`, created if missing. Only `flush` converts and writes rows, so a step does not
    wait.

    With `record_tokens`, texts, token ids and logprobs of rollouts are kept, and each prompt once. Raises TraceError if
    `folder` holds another run, this attempt, or a later attempt.
    """

    def __init__(self, folder: str | os.PathLike[str], meta: TraceMeta, record_tokens: bool) -> None:
        self._folder = Path(folder)
        self._record_tokens = record_tokens
        self._attempt = meta.attempt
        self._step = 0
        self._parts = 0
        self._closed = False
        self._records: dict[str, list[Any]] = {name: [] for name in TABLES}
        self._prompts: set[str] = set()
        """Ids of the prompts added so far."""
        _refuse_other_run(self._folder, meta)
        for name in TABLES:
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        # Traces are shared; their readers need no secrets of the spec.
        text = json.dumps(redacted({"trace_version": TRACE_VERSION, **asdict(meta)}), indent=2)
        write_whole(self._folder / META_FILE, text.encode())

    def add(self, record: Holding | Invocation | StepRecord | Decision) -> None:
        """Add a record that is a row as it is."""
        self._add(_TABLE[type(record)], record)

    def add_prompt(self, prompt: Prompt) -> None:
        """Add a prompt once, if tokens are recorded."""
        if self._record_tokens and prompt.prompt_id not in self._prompts:
            self._add("prompts", prompt)
            self._prompts.add(prompt.prompt_id)

    def add_rollout(self, step: int, rollout: Rollout, score: Score, prompt_tokens: int) -> TracedRollout:
        """Add a scored rollout of `step`, and return its record without tokens."""
        traced = TracedRollout(
            step=step,
            prompt_id=rollout.prompt_id,
            sample_index=rollout.sample_index,
            seed=rollout.seed,
            prompt_tokens=prompt_tokens,
            response_tokens=len(rollout.token_ids),
            cached_tokens=rollout.cached_tokens,
            reward=score.total,
            reward_parts=score.parts,
            reward_failures=score.failures,
            finish_reason=rollout.finish_reason,
            version_spans=rollout.version_spans,
            actor=rollout.actor,
            started_s=rollout.started_s,
            finished_s=rollout.finished_s,
            token_ids=None,
            logprobs=None,
            **_of_episode(rollout),
        )
        self._add("rollouts", (traced, rollout if self._record_tokens else None))
        return traced

    def flush(self, step: int) -> None:
        """Write all records added so far. `step` only names the parts. Records that could not be written (OSError) stay
        for the next flush."""
        self._step = step
        for name, records in self._records.items():
            if records:
                part = f"attempt{self._attempt:03d}-step{step:06d}-{self._parts:06d}.parquet"
                write_part(self._folder / name / part, TABLES[name], [_ROW[name](record) for record in records])
                self._parts += 1
                records.clear()

    def close(self) -> None:
        """Flush the remaining rows. Later additions raise TraceError. Idempotent."""
        if not self._closed:
            self.flush(self._step)
            self._closed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, table: str, record: object) -> None:
        if self._closed:
            raise TraceError(f"the trace in {self._folder} is closed; add to {table} before close()")
        self._records[table].append(record)


def _of_episode(rollout: Rollout) -> dict[str, Any]:
    episode = rollout.episode
    if episode is None:
        return {}
    given = sum(end - start for start, end in episode.given(len(rollout.token_ids)))
    return {
        "turns": len(episode.turns),
        "environment_tokens": given,
        "environment_s": episode.wait_s,
        "episode_status": str(episode.status),
        "turn_spans": tuple(
            TurnSpan(
                turn.start,
                turn.end,
                context,
                turn.cached_tokens,
                turn.started_s,
                turn.ended_s,
                sum(call.wait_s for call in episode.calls if call.turn == number),
            )
            for number, (turn, context) in enumerate(zip(episode.turns, episode.contexts(), strict=True))
        ),
    }


def _rollout_row(record: tuple[TracedRollout, Rollout | None]) -> tuple[Any, ...]:
    traced, drawn = record
    row = {name: getattr(traced, name) for name in TABLES["rollouts"].names}
    row |= {"reward_parts": list(traced.reward_parts.items()), "reward_failures": list(traced.reward_failures.items())}
    row["version_spans"] = [(span.version, span.start, span.end) for span in traced.version_spans]
    row["turn_spans"] = [astuple(span) for span in traced.turn_spans]
    if drawn is not None:
        row |= {"token_ids": drawn.token_ids.astype(np.int32), "logprobs": drawn.logprobs, "text": storable(drawn.text)}
        row["episode"] = None if drawn.episode is None else json.dumps(drawn.episode.as_json(), ensure_ascii=False)
    return tuple(row.values())


def _prompt_row(prompt: Prompt) -> tuple[Any, ...]:
    columns = json.dumps(storable_values(prompt.columns), ensure_ascii=False, default=str)
    tokens = np.asarray(prompt.token_ids, dtype=np.int32)
    return storable(prompt.prompt_id), prompt.source, storable(prompt.text), tokens, columns


def _decision_row(decision: Decision) -> tuple[Any, ...]:
    inputs = json.dumps(decision.inputs, sort_keys=True)
    return decision.step, decision.at_s, decision.kind, decision.choice, inputs


_ROW: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {
    "holdings": attrgetter(*TABLES["holdings"].names),
    "invocations": attrgetter(*TABLES["invocations"].names),
    "prompts": _prompt_row,
    "rollouts": _rollout_row,
    "steps": lambda record: (record.step, record.start_s, record.end_s, list(record.metrics.items())),
    "decisions": _decision_row,
}


def read_trace(folder: str | os.PathLike[str], *, tokens: bool = True) -> Trace:
    """Read a trace as records. Without `tokens`, skip its largest columns.

    Raises TraceError, naming the file, for an unknown version, a missing or mistyped column, or a file that is not
    Parquet. Temporary files of a dead writer are ignored.
    """
    meta = read_meta(folder)
    tables = read_tables(folder)
    if not tokens:
        tables["prompts"] = TABLES["prompts"].empty_table()
        rollouts = tables["rollouts"]
        for column in RECORDED:
            empty = pa.nulls(len(rollouts), rollouts.schema.field(column).type)
            rollouts = rollouts.set_column(rollouts.schema.get_field_index(column), column, empty)
        tables["rollouts"] = rollouts
    rows = {name: table.to_pylist(maps_as_pydicts="strict") for name, table in tables.items()}
    return Trace(
        meta=meta,
        holdings=tuple(holding_of(row) for row in rows["holdings"]),
        invocations=tuple(_invocation(row) for row in rows["invocations"]),
        prompts=tuple(
            TracedPrompt(**(row | {"token_ids": tuple(row["token_ids"]), "columns": json.loads(row["columns"])}))
            for row in rows["prompts"]
        ),
        rollouts=tuple(_rollout(row) for row in rows["rollouts"]),
        steps=tuple(StepRecord(**row) for row in rows["steps"]),
        decisions=tuple(Decision(**(row | {"inputs": json.loads(row["inputs"])})) for row in rows["decisions"]),
    )


def newest_responses(folder: str | os.PathLike[str], most_tokens: int) -> Iterator[tuple[str, IntArray]]:
    """Yield prompt ids and response tokens, newest first, up to `most_tokens` in total; none without
    `logging.record_tokens`. Raises TraceError."""
    for path in sorted((Path(folder) / "rollouts").glob("*.parquet"), reverse=True):
        table = read_part(path, "rollouts").select(["prompt_id", "token_ids"])
        for row in reversed(table.to_pylist()):
            tokens = np.asarray(row["token_ids"] or (), dtype=np.int64)
            most_tokens -= len(tokens)
            if most_tokens < 0:
                return
            if len(tokens):
                yield row["prompt_id"], tokens


def trace_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the trace folder, given that folder or the run's folder."""
    inner = Path(folder) / TRACE_FOLDER
    return inner if inner.is_dir() else Path(folder)


def read_tables(folder: str | os.PathLike[str]) -> dict[str, pa.Table]:
    """Read the trace as Arrow tables.

    The run may still be writing: steps are read first, so that all records of a read step are found.
    """
    read_meta(folder)
    tables = {name: _read_table(Path(folder), name) for name in reversed(list(TABLES))}
    return {name: tables[name] for name in TABLES}


def read_meta(folder: str | os.PathLike[str]) -> TraceMeta:
    """Read meta.json. Raises TraceError if it is missing, broken, or of another version."""
    path = Path(folder) / META_FILE
    try:
        content = parsed_json(path.read_bytes())
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist; name the folder of a run, or the `trace` in it") from None
    except ValueError as error:
        raise TraceError(f"{path} is not JSON ({error}); restore it from a copy of the run") from error
    version = content.pop("trace_version", None) if isinstance(content, dict) else None
    check_version(path, version)
    fields = TraceMeta.__dataclass_fields__
    missing = [name for name in fields if name not in content]
    if missing:
        raise TraceError(f"{path} has no {missing[0]!r}; restore it from a copy of the run")
    return TraceMeta(**{name: content[name] for name in fields})


def _refuse_other_run(folder: Path, meta: TraceMeta) -> None:
    if not (folder / META_FILE).exists():
        return
    stored = read_meta(folder)
    if stored.run_id != meta.run_id:
        raise TraceError(f"{folder} belongs to run {stored.run_id!r}; give {meta.run_id!r} its own folder")
    if stored.attempt >= meta.attempt:
        raise TraceError(
            f"{folder} was written by attempt {stored.attempt}, and this is attempt {meta.attempt}; "
            "raise the attempt number at every start, or choose another folder"
        )


def _read_table(folder: Path, name: str) -> pa.Table:
    schema = TABLES[name]
    parts = [read_part(path, name) for path in sorted((folder / name).glob("*.parquet"))]
    return pa.concat_tables(parts) if parts else schema.empty_table()


def holding_of(row: dict[str, Any]) -> Holding:
    typed = {"state": ReplicaState(row["state"])}
    return Holding(**(row | typed))


def _invocation(row: dict[str, Any]) -> Invocation:
    by_place = {name: tuple(row[name]) for name in ("drafted", "accepted")}
    return Invocation(**(row | {"work": Work(row["work"])} | by_place))


def _rollout(row: dict[str, Any]) -> TracedRollout:
    typed = {
        "finish_reason": FinishReason(row["finish_reason"]),
        "version_spans": tuple(VersionSpan(**span) for span in row["version_spans"]),
        "turn_spans": tuple(TurnSpan(**span) for span in row["turn_spans"]),
        "token_ids": None if row["token_ids"] is None else tuple(row["token_ids"]),
        "logprobs": None if row["logprobs"] is None else tuple(row["logprobs"]),
        "episode": None if row["episode"] is None else json.loads(row["episode"]),
    }
    return TracedRollout(**(row | typed))


# -- comparison


Key = tuple[int, str, int]
"""(step, prompt id, sample index)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Samples of two runs, compared by key."""

    compared: int
    """Number of samples that both runs have."""
    identical: int
    """Number of samples with the same tokens."""
    first_difference: Key | None
    """The first sample that differs."""
    only_in_first: int
    only_in_second: int

    @property
    def fraction(self) -> float:
        """Share of compared samples that are token-identical; 1 if none were compared."""
        return self.identical / self.compared if self.compared else 1.0


def compare_samples(first: Trace, second: Trace) -> Comparison:
    """Compare all samples of two traces. Raises TraceError for a trace without token ids."""
    samples, others = _by_key(first), _by_key(second)
    common = sorted(samples.keys() & others.keys())
    different = [key for key in common if samples[key].token_ids != others[key].token_ids]
    return Comparison(
        compared=len(common),
        identical=len(common) - len(different),
        first_difference=next(iter(different), None),
        only_in_first=len(samples.keys() - others.keys()),
        only_in_second=len(others.keys() - samples.keys()),
    )


def _by_key(trace: Trace) -> Mapping[Key, TracedRollout]:
    if any(rollout.token_ids is None for rollout in trace.rollouts):
        raise TraceError(f"the trace of {trace.meta.run_id} has no token ids; record it with logging.record_tokens")
    return {(rollout.step, rollout.prompt_id, rollout.sample_index): rollout for rollout in trace.rollouts}
