"""A lease ends once, when no call renews it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from rlhfless.functions.base import Lease, LeaseTerms


def test_it_ends_when_no_sign_of_life_comes() -> None:
    ended = threading.Event()
    Lease(LeaseTerms(first_s=0.05, renewed_s=60), ended.set)
    assert ended.wait(60)


def test_the_first_call_ends_the_long_wait_of_the_start() -> None:
    ended = threading.Event()
    Lease(LeaseTerms(first_s=600, renewed_s=0.05), ended.set).renew()
    assert ended.wait(60)


def test_renewing_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves while it sleeps: each 0.5 s of the first 4.5 the driver gives a sign of life."""
    now_s, made, ended = 0.0, threading.Event(), threading.Event()

    def sleep(wanted_s: float) -> None:
        nonlocal now_s
        assert made.wait(60)
        now_s += min(wanted_s, 0.5)
        if now_s < 5:
            lease.renew()

    monkeypatch.setattr("rlhfless.functions.base.time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    lease = Lease(LeaseTerms(first_s=1, renewed_s=1), ended.set)
    made.set()
    assert ended.wait(60)
    assert now_s == 5.5
