"""Delivers the outbox to the service and receives its answers, in one thread of a driver's process.

The run goes on while the service is away; all items are delivered when it is back, even at another address.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from rlhfless.control.delivery import DriverOrder, DriverState, Item, Push, PushAnswer
from rlhfless.control.driver.outbox import Outbox

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Longest time between two pushes: they carry the driver's state to the service, and its answer back."""

GATHER_S = 0.05
"""Items that come within this time go into one push."""

TIMEOUT_S = 10.0
"""Longest wait for an answer to a push."""

AWAY_S = 2.0
"""Time between two tries while the service does not answer."""

SAY_AGAIN_S = 60.0
"""Time between two log lines about the same silence."""


class Replaced(Exception):
    """The service knows another driver of the run, or does not know the run any more: this driver must end."""


class Link:
    """The delivery thread. Only `wake` and `close` are called from other threads."""

    def __init__(
        self,
        order: DriverOrder,
        outbox: Outbox,
        state: Callable[[], DriverState],
        on_answer: Callable[[PushAnswer], None],
        on_replaced: Callable[[str], None],
        marked: bool = False,
    ) -> None:
        """`marked`: see Push. `state`, `on_answer` and `on_replaced` are called in the link's thread."""
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
        self._said_s = 0.0
        self._thread = threading.Thread(target=self._run, name="service-link", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def wake(self) -> None:
        """Push at once: there is something to deliver."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Deliver all items; returns whether the service has them. The others stay in the outbox."""
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
                return  # `close` has waited long enough, and the outbox is closed
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
            self._wake.wait(BEAT_S)
            if self._wake.is_set() and not self._closing.is_set():
                time.sleep(GATHER_S)
            self._wake.clear()

    def _push(self) -> bool:
        """Push once; returns whether there is more to deliver."""
        items: list[Item] = [] if self._pushed is None else self._outbox.after(self._pushed)
        push = Push(attempt=self._order.attempt, items=items, now=self._state(), marked=self._marked)
        url = self._order.service_url or json.loads(Path(self._order.service_file).read_text("utf-8"))["url"]
        response = self._client.post(
            f"{url}/internal/runs/{self._order.run_id}/deliveries",
            content=push.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        if response.status_code == 409 and response.json()["error"]["code"] == "gap":
            self._pushed = None  # the service has fewer than it had: ask which
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
            self._silent_since_s, self._said_s = now_s, 0.0
        if now_s - self._said_s > SAY_AGAIN_S:
            self._said_s = now_s
            silent_s = now_s - self._silent_since_s
            log.info("the service does not answer for %.0f s (%s); the run goes on", silent_s, error)
