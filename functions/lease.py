"""A replica's lease: when it gets no sign of life from its driver for this long, it gives its device back.

The clock runs in a thread of its own, so that a replica that computes, or whose event loop is stuck, is watched too.
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
    """How long a replica lives without a call of its driver."""

    first_s: float
    """Until the first call: the start itself takes this long at most."""
    renewed_s: float
    """After each call."""


class Lease:
    """Calls `expired` once, from its own thread, when no `renew` came in time."""

    def __init__(self, terms: LeaseTerms, expired: Callable[[], None]) -> None:
        self._terms = terms
        self._expired = expired
        self._ends_s = time.monotonic() + terms.first_s
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self, for_s: float | None = None) -> None:
        """Renew the lease for the length of its terms, or for `for_s`: the driver is alive."""
        self._ends_s = time.monotonic() + (self._terms.renewed_s if for_s is None else for_s)

    def _watch(self) -> None:
        while (left_s := self._ends_s - time.monotonic()) > 0:
            # The first call makes the wait shorter, so the wait is checked well before its end.
            time.sleep(min(left_s, self._terms.renewed_s))
        log.warning("no call came for %.0f s: the driver is gone, and so is this replica", self._terms.renewed_s)
        self._expired()
