"""Checks of sleep: what functions that take turns on a device give back, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rlhfless.records import FunctionName, SleepTier
from rlhfless.scaling.memory import GIB
from rlhfless.selftest import rank_work
from rlhfless.selftest.check import Measured, Wrong, check
from rlhfless.selftest.engines import compared, running
from rlhfless.selftest.ranks import up
from rlhfless.selftest.subject import Subject

GIVEN_BACK = 0.9
"""Fewest bytes that sleep gives back, as a share of those that a function keeps on its device."""

SLACK_BYTES = 2**24
"""Not expected back: ends of pages, and what allocators keep."""

TURNS = "turns"
"""The result that has, by function, its seconds of sleep and of wake."""


@check("learner asleep", "leave placement.turns at false, and report it with this file", needs=("learner",))
def learner(subject: Subject) -> Measured:
    """All ranks sleep with weights and moments in the host's memory, and wake: seconds, bytes given back, and the same
    logprobs as before."""
    naps = up(subject).do(rank_work.nap, rank_work.batch(subject))
    measured = {name: max(nap[name] for nap in naps) for name in ("sleep_s", "wake_s")}
    measured |= _given_back(min(nap["freed_bytes"] for nap in naps), max(nap["state_bytes"] for nap in naps))
    _judge(subject, FunctionName.LEARNER, measured)
    if not all(nap["same"] for nap in naps):
        raise Wrong("the learner computes other logprobs after it has slept", **measured)
    return measured


@check("engine asleep", "leave placement.turns at false, and report it with this file", needs=("probe",))
def engine(subject: Subject) -> Measured:
    """The engine sleeps without weights and KV, as between two steps, wakes, loads and computes the learner's
    logprobs: seconds, and bytes given back of the weights and, where planned, of the KV cache."""
    engines, weights = running(subject), subject.results["published"]
    own, run = engines.engine, engines.run
    sleep_s, slept = _timed(lambda: run(own.sleep(SleepTier.DROPPED)))
    weights_s, _ = _timed(lambda: run(own.wake("weights")))
    load_s, report = _timed(lambda: run(own.load(weights)))
    kv_s, _ = _timed(lambda: run(own.wake("kv_cache")))
    measured = {"sleep_s": sleep_s, "wake_s": weights_s + kv_s, "load_s": load_s}
    measured |= _given_back(slept.freed_bytes, weights.size_bytes + engines.kv_bytes)
    _judge(subject, FunctionName.GENERATION, measured)
    return measured | compared(subject, report, run(own.logprobs(weights.probe.token_ids)))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = work()
    return time.perf_counter() - began_s, result


def _given_back(freed_bytes: int, kept_bytes: int) -> dict[str, float]:
    return {"given_back_gib": freed_bytes / GIB, "kept_gib": kept_bytes / GIB}


def _judge(subject: Subject, function: str, measured: Measured) -> None:
    """Keep the seconds for the report. Raises Wrong if too little memory was given back."""
    if measured["given_back_gib"] < GIVEN_BACK * measured["kept_gib"] - SLACK_BYTES / GIB:
        raise Wrong("the device's memory was not given back", **measured)
    subject.results.setdefault(TURNS, {})[function] = {name: measured[name] for name in ("sleep_s", "wake_s")}
