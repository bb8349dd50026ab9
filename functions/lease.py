"""A replica's lease: without a call from its driver in time, it releases its device.

The clock runs in a separate thread, so that a busy replica or a stuck event loop is watched too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long a replica lives without a call from its driver."""

    first_s: float
    """Seconds until the first call; must cover the start."""
    renewed_s: float
    """Seconds after each call."""


class Lease:
    """Calls `expired` once, from its own thread, when `renew` was not called in time."""

    def __init__(self, terms: LeaseTerms, expired: Callable[[], None]) -> None:
        self._terms = terms
        self._expired = expired
        self._ends_s = time.monotonic() + terms.first_s
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self, for_s: float | None = None) -> None:
        """Renew the lease for its regular term, or for `for_s`."""
        self._ends_s = time.monotonic() + (self._terms.renewed_s if for_s is None else for_s)

    def _watch(self) -> None:
        while (left_s := self._ends_s - time.monotonic()) > 0:
            # The first call shortens the wait, so check well before its end.
            time.sleep(min(left_s, self._terms.renewed_s))
        log.warning("no call for %.0f s; assuming the driver is gone and stopping this replica", self._terms.renewed_s)
        self._expired()
