"""Delivers what the outbox has, and hears what the service wants: one thread of a driver's process.

The service may be away for as long as it likes: the run goes on, and everything is delivered when it is back, wherever
it answers then.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from rlhfless.control.delivery import DriverOrder, Item, Now, Push, PushAnswer
from rlhfless.control.driver.outbox import Outbox

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""A push at least so often: the service hears what the run does, and the driver what is wanted of it."""

GATHER_S = 0.05
"""Items that come within this time go in one push."""

TIMEOUT_S = 10.0
"""Longest wait for an answer."""

AWAY_S = 2.0
"""Between two tries while the service does not answer."""

SAY_AGAIN_S = 60.0
"""Between two lines of the log about the same silence."""


class Replaced(Exception):
    """The service knows another driver of the run, or the run no more: this driver must end."""


class Link:
    """Belongs to its own thread, but for `wake` and `close`."""

    def __init__(
        self,
        order: DriverOrder,
        outbox: Outbox,
        now: Callable[[], Now],
        heard: Callable[[PushAnswer], None],
        replaced: Callable[[str], None],
        marked: bool = False,
    ) -> None:
        """`marked`: see Push. `now`, `heard` and `replaced` are called in the link's thread."""
        self._order = order
        self._outbox = outbox
        self._now = now
        self._heard = heard
        self._replaced = replaced
        self._marked = marked
        self._client = httpx.Client(timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {order.token}"})
        self._pushed: int | None = None
        """Items that the service has; None until it was asked."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._silent_since_s: float | None = None
        self._said_s = 0.0
        self._thread = threading.Thread(target=self._run, name="service-link", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to deliver."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Deliver what is there; returns whether the service has all of it. What it has not stays in the outbox."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                left = self._push()
            except Replaced as error:
                self._replaced(str(error))
                return
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
        """One push; returns whether there is more to deliver."""
        items: list[Item] = [] if self._pushed is None else self._outbox.after(self._pushed)
        push = Push(attempt=self._order.attempt, items=items, now=self._now(), marked=self._marked)
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
            self._outbox.delivered(answer.pushed)
        self._heard(answer)
        return asked or bool(self._outbox.after(answer.pushed, limit=1))

    def _note_silence(self, error: Exception) -> None:
        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s, self._said_s = now_s, 0.0
        if now_s - self._said_s > SAY_AGAIN_S:
            self._said_s = now_s
            silent_s = now_s - self._silent_since_s
            log.info("the service does not answer for %.0f s (%s); the run goes on", silent_s, error)
