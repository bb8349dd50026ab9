"""Checks of sleep: the memory that functions free when they take turns on a device, and the time this takes."""

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
"""Smallest share of a function's device memory that sleep must free."""

SLACK_BYTES = 2**24
"""Not expected to be freed: partial pages, and memory that allocators keep."""

TURNS = "turns"
"""Result with the seconds of sleep and wake, by function."""


@check("learner asleep", "leave placement.turns at false, and report it with this file", needs=("learner",))
def learner(subject: Subject) -> Measured:
    """Put all ranks to sleep with weights and moments in host memory, then wake them. Measures seconds and freed bytes,
    and compares logprobs with those before."""
    naps = up(subject).do(rank_work.nap, rank_work.batch(subject))
    measured = {name: max(nap[name] for nap in naps) for name in ("sleep_s", "wake_s")}
    measured |= _given_back(min(nap["freed_bytes"] for nap in naps), max(nap["state_bytes"] for nap in naps))
    _judge(subject, FunctionName.LEARNER, measured)
    if not all(nap["same"] for nap in naps):
        raise Wrong("the learner's logprobs changed after sleep and wake", **measured)
    return measured


@check("engine asleep", "leave placement.turns at false, and report it with this file", needs=("probe",))
def engine(subject: Subject) -> Measured:
    """Put the engine to sleep without weights and KV, as between two steps, then wake it, load, and compare logprobs
    with the learner's. Measures seconds, and freed bytes of the weights and, if planned, of the KV cache."""
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
    """Store the seconds for the report. Raises Wrong if too little memory was freed."""
    if measured["given_back_gib"] < GIVEN_BACK * measured["kept_gib"] - SLACK_BYTES / GIB:
        raise Wrong("the device's memory was not given back", **measured)
    subject.results.setdefault(TURNS, {})[function] = {name: measured[name] for name in ("sleep_s", "wake_s")}
