"""The journal of a run, one SQLite file: every finished rollout is on disk before it counts.

An interrupted step is repeated from its rows, and only missing samples are generated. A checkpoint deletes rows that it
makes unnecessary. Where steps defer groups (`schedule: partial`), the journal also stores the started groups, the step
that learns from each, and partial samples. The step of a rollout is then the one that started it.

Durability: a transaction survives a killed process. A power failure may lose the last transactions, but never part of
one; those samples are generated again with their seeds, which is cheaper than syncing every group.

The journal also issues attempt numbers, which fence the run's folder: once a newer attempt has started, an older driver
cannot write.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless.records.episodes import Episode
from rlhfless.records.rollouts import FinishReason, Rollout, RouteSpan, VersionSpan
from rlhfless.records.routes import forget_routes
from rlhfless.util.errors import UserError

JOURNAL_VERSION = 5

LOCK_S = 30.0
"""Maximum wait for another process's lock; a transaction takes milliseconds."""

_SCHEMA = """
CREATE TABLE attempts (
    attempt INTEGER PRIMARY KEY, started_s REAL NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL
);
CREATE TABLE rollouts (
    step INTEGER NOT NULL, prompt_id TEXT NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
    seed INTEGER NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, text TEXT NOT NULL,
    finish_reason TEXT NOT NULL, version_spans TEXT NOT NULL, actor TEXT NOT NULL,
    started_s REAL NOT NULL, finished_s REAL NOT NULL, cached_tokens INTEGER NOT NULL, episode TEXT, routes TEXT,
    UNIQUE (step, prompt_id, sample_index)
);
CREATE TABLE groups (
    begun INTEGER NOT NULL, place INTEGER NOT NULL, prompt_id TEXT NOT NULL, taken INTEGER, PRIMARY KEY (begun, place)
) WITHOUT ROWID;
"""

_COLUMNS = (
    "prompt_id, sample_index, seed, token_ids, logprobs, text, finish_reason, version_spans, actor, started_s, "
    "finished_s, cached_tokens, episode, routes"
)


class JournalError(UserError):
    """The journal cannot be read or written, for example on a full disk. The message names the file."""


class StaleAttempt(UserError):
    """A newer attempt of the run has started, so this driver must stop."""


@dataclass(frozen=True, slots=True)
class BegunGroup:
    """A group that a step has started. That step or a later one learns from it."""

    begun: int
    prompt_id: str
    taken: int | None
    """The step that learns from it, once decided."""


class Journal:
    """The journal in one file, created if missing. Not thread-safe: use it from one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.attempt = 0
        """This driver's attempt; 0 until `begin_attempt`. No rollouts can be added before."""
        with self._errors():
            self._database = sqlite3.connect(path, timeout=LOCK_S, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._prepare()

    def begin_attempt(self) -> int:
        """Take the next attempt number, so that older drivers of the run can no longer write."""
        with self._errors(), self._transaction():
            (newest,) = self._database.execute("SELECT coalesce(max(attempt), 0) FROM attempts").fetchone()
            self.attempt = int(newest) + 1
            row = (self.attempt, time.time(), platform.node(), os.getpid())
            self._database.execute("INSERT INTO attempts VALUES (?, ?, ?, ?)", row)
        return self.attempt

    def add(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write rollouts of a step, finished or aborted for later continuation; they are on disk when this returns.

        Finished rows never change. Raises StaleAttempt, or JournalError if nothing could be written.
        """
        rows = [(step, self.attempt, *_row(rollout)) for rollout in rollouts]
        with self._errors(), self._transaction():
            self._require_newest()
            self._database.executemany(
                "DELETE FROM rollouts WHERE step = ? AND prompt_id = ? AND sample_index = ? AND finish_reason = ?",
                [(step, *rollout.key, str(FinishReason.ABORT)) for rollout in rollouts],
            )
            self._database.executemany(
                f"INSERT OR IGNORE INTO rollouts (step, attempt, {_COLUMNS}) VALUES ({', '.join('?' * 16)})", rows
            )

    def rollouts(self, *steps: int) -> list[Rollout]:
        """Return the rollouts of steps in the order in which they were added, so a repeated step sees the same
        completion order."""
        query = f"SELECT {_COLUMNS} FROM rollouts WHERE step IN ({', '.join('?' * len(steps))}) ORDER BY rowid"
        with self._errors():
            return [_rollout(row) for row in self._database.execute(query, steps)]

    def begin_groups(self, step: int, prompt_ids: Sequence[str]) -> None:
        """Write the groups that a step starts, in order. Raises as `add` does."""
        rows = [(step, place, prompt_id) for place, prompt_id in enumerate(prompt_ids)]
        with self._errors(), self._transaction():
            self._require_newest()
            self._database.executemany("INSERT INTO groups (begun, place, prompt_id) VALUES (?, ?, ?)", rows)

    def take_groups(self, step: int, groups: Sequence[tuple[int, str]]) -> None:
        """Write the groups that a step learns from, as (starting step, prompt id). Raises as `add` does."""
        rows = [(step, begun, prompt_id) for begun, prompt_id in groups]
        with self._errors(), self._transaction():
            self._require_newest()
            self._database.executemany("UPDATE groups SET taken = ? WHERE begun = ? AND prompt_id = ?", rows)

    def groups(self, step: int) -> list[BegunGroup]:
        """Return the groups that a step may learn from, in the order in which they were started: its own, and deferred
        groups of earlier steps."""
        query = "SELECT begun, prompt_id, taken FROM groups WHERE begun <= ? AND (taken IS NULL OR taken >= ?)"
        with self._errors():
            rows = self._database.execute(f"{query} ORDER BY begun, place", (step, step))
            return [BegunGroup(*row) for row in rows]

    def forget(self, up_to_step: int) -> None:
        """Delete the data of all steps up to this one, which a checkpoint covers, with their routes
        (rlhfless.records.routes). Groups deferred to later steps stay."""
        with self._errors(), self._transaction():
            self._require_newest()
            self._database.execute("DELETE FROM groups WHERE taken <= ?", (up_to_step,))
            left = "SELECT begun, prompt_id FROM groups"
            query = f"DELETE FROM rollouts WHERE step <= ? AND (step, prompt_id) NOT IN ({left})"
            self._database.execute(query, (up_to_step,))
            rows = self._database.execute("SELECT routes FROM rollouts WHERE routes IS NOT NULL")
            kept = {span[0] for (routes,) in rows for span in json.loads(routes)}
        if self._path.exists():  # not in memory
            forget_routes(self._path.parent, up_to_step, kept)

    def close(self) -> None:
        self._database.close()

    def redraw(self, after_step: int) -> int:
        """Delete all rollouts, so that a resume after this step generates them again. Return the number of later steps
        that had rollouts."""
        with self._errors(), self._transaction():
            query = "SELECT count(DISTINCT step) FROM rollouts WHERE step > ?"
            (steps,) = self._database.execute(query, (after_step,)).fetchone()
            self._database.execute("DELETE FROM rollouts")
            self._database.execute("DELETE FROM groups WHERE begun > ?", (after_step,))
            self._database.execute("UPDATE groups SET taken = NULL WHERE taken > ?", (after_step,))
        return int(steps)

    def _prepare(self) -> None:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version == JOURNAL_VERSION:
            return
        if version:
            raise JournalError(f"{self._path} is of version {version}, and this rlhfless knows {JOURNAL_VERSION}")
        with self._transaction():
            for statement in _SCHEMA.split(";"):
                self._database.execute(statement)
            self._database.execute(f"PRAGMA user_version={JOURNAL_VERSION}")

    def _require_newest(self) -> None:
        (newest,) = self._database.execute("SELECT coalesce(max(attempt), 0) FROM attempts").fetchone()
        if newest != self.attempt:
            raise StaleAttempt(
                f"attempt {newest} of this run has started, so attempt {self.attempt} (this process) may not continue; "
                f"the journal is {self._path}"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self._path} could not be read or written: {error}") from error


def has_rollouts(path: Path) -> bool:
    """Return whether a journal holds rollouts, which a resumed run would reuse; True also if it cannot be read."""
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_S)) as database:
            return database.execute("SELECT 1 FROM rollouts LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return True


def _row(rollout: Rollout) -> tuple[object, ...]:
    """Return a rollout's values in the order of `_COLUMNS`."""
    spans = json.dumps([(span.version, span.start, span.end) for span in rollout.version_spans])
    routes = [(span.file, span.start, span.end, span.row) for span in rollout.routes]
    return (
        rollout.prompt_id,
        rollout.sample_index,
        rollout.seed,
        rollout.token_ids.astype("<i8").tobytes(),
        rollout.logprobs.astype("<f4").tobytes(),
        rollout.text,
        str(rollout.finish_reason),
        spans,
        rollout.actor,
        rollout.started_s,
        rollout.finished_s,
        rollout.cached_tokens,
        None if rollout.episode is None else json.dumps(rollout.episode.as_json()),
        json.dumps(routes) if routes else None,
    )


def _rollout(row: tuple[Any, ...]) -> Rollout:
    prompt_id, index, seed, tokens, logprobs, text, reason, spans, actor, started_s, finished_s, *rest = row
    cached, episode, routes = rest
    return Rollout(
        prompt_id,
        index,
        seed,
        np.frombuffer(tokens, dtype="<i8"),
        np.frombuffer(logprobs, dtype="<f4"),
        text,
        FinishReason(reason),
        tuple(VersionSpan(*span) for span in json.loads(spans)),
        actor,
        started_s,
        finished_s,
        cached,
        None if episode is None else Episode.of_json(json.loads(episode)),
        tuple(RouteSpan(*span) for span in json.loads(routes or "[]")),
    )
