"""A lease ends once, when no call renews it."""

from __future__ import annotations

import threading
import time

from rlhfless.functions.lease import Lease, LeaseTerms


def test_it_ends_when_no_sign_of_life_comes() -> None:
    ended = threading.Event()
    Lease(LeaseTerms(first_s=0.05, renewed_s=60), ended.set)
    assert ended.wait(10)


def test_the_first_call_ends_the_long_wait_of_the_start() -> None:
    ended = threading.Event()
    Lease(LeaseTerms(first_s=600, renewed_s=0.05), ended.set).renew()
    assert ended.wait(10)


def test_renewing_keeps_it() -> None:
    calls: list[float] = []
    lease = Lease(LeaseTerms(first_s=0.2, renewed_s=0.2), lambda: calls.append(time.monotonic()))
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        lease.renew()
        time.sleep(0.01)
    assert calls == []
