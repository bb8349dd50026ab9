"""Delivers a run's events to the service exactly once and in order, even if processes are killed.

Items are kept in an SQLite file in the run's folder until the service has them. They are numbered without gaps across
all attempts of the run, so a later driver delivers items that an earlier driver could not. A driver cannot add items
after a newer attempt has started. An item survives the death of the process; a power failure may lose the last items
and the steps they report, but the run then resumes from its checkpoint and reports these steps again.

A thread pushes the items and receives the service's answers. The run continues while the service is away, and all items
are delivered when it is back, even at another address.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from rlhfless.control.delivery import ITEMS_PER_PUSH, DriverOrder, DriverState, Item, Push, PushAnswer
from rlhfless.util.text import storable_values

OUTBOX_FILE = "outbox.sqlite"

LOCK_S = 30.0
"""Maximum wait for another process that has locked the file. A transaction takes a millisecond."""

KEPT_ITEMS = 10_000
"""Number of delivered items that are kept, because a database restored from a backup asks for them again."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS attempts (attempt INTEGER PRIMARY KEY);
"""


class StaleOutbox(RuntimeError):
    """A newer attempt of the run has started, so this driver must exit."""


class Outbox:
    """The outbox of one attempt. Thread-safe."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Open the outbox. Raises StaleOutbox if a newer attempt has started."""
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
        """Add an item; it is on disk when this returns. Raises StaleOutbox."""
        text = json.dumps(storable_values(data), allow_nan=False)  # PostgreSQL cannot store NUL
        with self._transaction():
            self._require_newest()
            self._database.execute(
                "INSERT INTO items (attempt, at, kind, data) VALUES (?, ?, ?, ?)",
                (self._attempt, time.time(), kind, text),
            )

    def after(self, seq: int, limit: int = ITEMS_PER_PUSH) -> list[Item]:
        """Return the items after number `seq`, in order."""
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
            raise StaleOutbox(f"attempt {newest} of the run has started; attempt {self._attempt} ends")

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
    """Return the items after number `seq` of a run's outbox, from outside its driver; empty without an outbox."""
    file = folder / OUTBOX_FILE
    if not file.exists():
        return []
    with closing(sqlite3.connect(file, timeout=LOCK_S)) as database:
        try:
            return _items_after(database, seq, limit=-1)
        except sqlite3.OperationalError:  # its driver was killed before the tables were created
            return []


def _items_after(database: sqlite3.Connection, seq: int, limit: int) -> list[Item]:
    """Return the items after number `seq`, in order. A `limit` < 0 returns all."""
    query = "SELECT seq, attempt, at, kind, data FROM items WHERE seq > ? ORDER BY seq LIMIT ?"
    rows = database.execute(query, (seq, limit)).fetchall()
    return [
        Item(seq=number, attempt=attempt, at=at, kind=kind, data=json.loads(data))
        for number, attempt, at, kind, data in rows
    ]


log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Maximum time between two pushes. A push carries the driver's state to the service, and its answer back."""

GATHER_S = 0.05
"""Items that arrive within this time share one push."""

TIMEOUT_S = 10.0
"""Maximum wait for an answer to a push."""

AWAY_S = 2.0
"""Time between two attempts while the service does not answer."""

LOG_AGAIN_S = 60.0
"""Time between two log lines about the same outage."""


class Replaced(Exception):
    """The service knows another driver of the run, or no longer knows the run, so this driver must exit."""


class ServiceClient:
    """The delivery thread. Other threads call only `wake` and `close`."""

    def __init__(
        self,
        order: DriverOrder,
        outbox: Outbox,
        state: Callable[[], DriverState],
        on_answer: Callable[[PushAnswer], None],
        on_replaced: Callable[[str], None],
        marked: bool = False,
    ) -> None:
        """`marked`: see Push. `state`, `on_answer` and `on_replaced` are called in the client's thread."""
        self._order = order
        self._outbox = outbox
        self._state = state
        self._on_answer = on_answer
        self._on_replaced = on_replaced
        self._marked = marked
        self._client = httpx.Client(timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {order.token}"})
        self._pushed: int | None = None
        """Number of items that the service has; None before its first answer."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._silent_since_s: float | None = None
        self._logged_s = 0.0
        self._thread = threading.Thread(target=self._run, name="service-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Push at once."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Deliver all items, and return whether the service has them. Undelivered items stay in the outbox."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                left = self._push()
            except Replaced as error:
                self._on_replaced(str(error))
                return
            except sqlite3.ProgrammingError:
                if not self._closing.is_set():
                    raise
                return  # `close` has timed out, and the outbox is closed
            except (httpx.HTTPError, OSError, ValueError) as error:
                self._note_silence(error)
                self._wake.wait(AWAY_S)
                self._wake.clear()
                continue
            self._silent_since_s = None
            if left:
                continue
            if self._closing.is_set():
                return
            self._wake.wait(HEARTBEAT_S)
            if self._wake.is_set() and not self._closing.is_set():
                time.sleep(GATHER_S)
            self._wake.clear()

    def _push(self) -> bool:
        """Push once, and return whether there is more to deliver."""
        items: list[Item] = [] if self._pushed is None else self._outbox.after(self._pushed)
        push = Push(attempt=self._order.attempt, items=items, now=self._state(), marked=self._marked)
        url = self._order.service_url or json.loads(Path(self._order.service_file).read_text("utf-8"))["url"]
        response = self._client.post(
            f"{url}/internal/runs/{self._order.run_id}/deliveries",
            content=push.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        if response.status_code == 409 and response.json()["error"]["code"] == "gap":
            self._pushed = None  # the service has fewer items than before: ask for its last number
            return True
        if response.status_code in (401, 404, 409):
            raise Replaced(response.json()["error"]["message"])
        response.raise_for_status()
        answer = PushAnswer.model_validate_json(response.content)
        asked, self._pushed = self._pushed is None, answer.pushed
        self._marked = False
        if items:
            self._outbox.forget_delivered(answer.pushed)
        self._on_answer(answer)
        return asked or bool(self._outbox.after(answer.pushed, limit=1))

    def _note_silence(self, error: Exception) -> None:
        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s, self._logged_s = now_s, 0.0
        if now_s - self._logged_s > LOG_AGAIN_S:
            self._logged_s = now_s
            silent_s = now_s - self._silent_since_s
            log.info("service silent for %.0f s (%s); the run continues", silent_s, error)
