"""The items that a driver has to deliver, kept in an SQLite file of the run's folder until the service has them.

Items are numbered over all attempts of the run without gaps, so that a later driver delivers what an earlier one could
not. A driver cannot add items after a newer attempt has begun.

An item survives the death of the process; a power failure may lose the last items, and the steps they report: the run
goes on from its checkpoint and reports these steps again.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rlhfless.control.delivery import ITEMS_PER_PUSH, Item
from rlhfless.util.text import storable_values

OUTBOX_FILE = "outbox.sqlite"

LOCK_S = 30.0
"""Longest wait for another process that has the file locked: a transaction takes a millisecond."""

KEPT_ITEMS = 10_000
"""Delivered items that are kept: a database that was restored from a copy asks for them again."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS attempts (attempt INTEGER PRIMARY KEY);
"""


class StaleOutbox(RuntimeError):
    """A newer attempt of the run has begun; this driver must end."""


class Outbox:
    """The outbox of one attempt; it may be used from several threads."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Raises StaleOutbox if a newer attempt has begun."""
        self._lock = threading.Lock()
        self._attempt = attempt
        self._database = sqlite3.connect(
            folder / OUTBOX_FILE, timeout=LOCK_S, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)
        with self._transaction():
            self._require_newest()
            self._database.execute("INSERT OR IGNORE INTO attempts VALUES (?)", (attempt,))

    def add(self, kind: str, data: Mapping[str, Any]) -> None:
        """Add an item, which is on disk when this returns. Raises StaleOutbox."""
        text = json.dumps(storable_values(data), allow_nan=False)  # PostgreSQL keeps no NUL
        with self._transaction():
            self._require_newest()
            self._database.execute(
                "INSERT INTO items (attempt, at, kind, data) VALUES (?, ?, ?, ?)",
                (self._attempt, time.time(), kind, text),
            )

    def after(self, seq: int, limit: int = ITEMS_PER_PUSH) -> list[Item]:
        """The items after this number, in order."""
        with self._lock:
            return _items_after(self._database, seq, limit)

    def forget_delivered(self, seq: int) -> None:
        """Remove old items. `seq`: number of the last item that the service has."""
        with self._transaction():
            self._database.execute("DELETE FROM items WHERE seq <= ?", (seq - KEPT_ITEMS,))

    def close(self) -> None:
        self._database.close()

    def _require_newest(self) -> None:
        (newest,) = self._database.execute("SELECT coalesce(max(attempt), 0) FROM attempts").fetchone()
        if newest > self._attempt:
            raise StaleOutbox(f"attempt {newest} of the run has begun; attempt {self._attempt} ends")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")


def undelivered(folder: Path, seq: int) -> list[Item]:
    """The items of a run's outbox after a number, read from outside its driver; empty if there is no outbox."""
    file = folder / OUTBOX_FILE
    if not file.exists():
        return []
    with closing(sqlite3.connect(file, timeout=LOCK_S)) as database:
        try:
            return _items_after(database, seq, limit=-1)
        except sqlite3.OperationalError:  # its driver was killed before the tables were there
            return []


def _items_after(database: sqlite3.Connection, seq: int, limit: int) -> list[Item]:
    """Items after a number, in order. A `limit` below 0 is none."""
    query = "SELECT seq, attempt, at, kind, data FROM items WHERE seq > ? ORDER BY seq LIMIT ?"
    rows = database.execute(query, (seq, limit)).fetchall()
    return [
        Item(seq=number, attempt=attempt, at=at, kind=kind, data=json.loads(data))
        for number, attempt, at, kind, data in rows
    ]
