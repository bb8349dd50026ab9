"""Checks of engine and learner together: a whole step, to compare with its prediction, and sleep between turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfless.functions.generation.engine import SampleRequest
from rlhfless.planning.memory_plan import edited
from rlhfless.prediction.run_plan import Planner
from rlhfless.prediction.simulated import Lengths, lengths_of
from rlhfless.records import FunctionName, SleepTier
from rlhfless.scaling.memory import GIB
from rlhfless.selftest import rank_work
from rlhfless.selftest.check import Measured, Subject, Wrong, check
from rlhfless.selftest.engines import check_probe, publish, running
from rlhfless.selftest.ranks import up
from rlhfless.sim.replay.latency_file import LatencyFile
from rlhfless.spec import SyncSpec

STEP = 3
"""Version number, after those of the other checks."""

MOST_SAMPLES, MOST_TOKENS = 256, 512
"""Limits on the step's samples and on a response's tokens, so that a large model takes a minute instead of ten."""


@check("step", "see the trace", needs=("speed",))
def step(subject: Subject) -> Measured:
    """Run a step of one actor's samples in sequence: publish, load, generate with the plan's assumed lengths, learn.
    The report compares it with its prediction."""
    engines, requests = running(subject), _requests(subject)
    samples = subject.spec.samples_per_prompt
    times = [time.perf_counter()]
    subject.results["published"], _ = publish(subject, STEP)
    times.append(time.perf_counter())
    engines.load(subject.results["published"])
    times.append(time.perf_counter())
    sampled = engines.sample(*requests)
    times.append(time.perf_counter())
    groups = [
        (requests[first].token_ids, [(one.token_ids, one.logprobs) for one in sampled[first : first + samples]])
        for first in range(0, len(requests), samples)
    ]
    up(subject).do(rank_work.learn, rank_work.packed(groups))
    times.append(time.perf_counter())
    names = ("publish_s", "load_s", "generation_s", "learn_s")
    parts = dict(zip(names, np.diff(times).tolist(), strict=True))
    subject.results["step"] = parts | {
        "step_s": times[-1] - times[0],
        "prompts": len(groups),
        "prompt_tokens": len(requests[0].token_ids),
        "response_tokens": [len(one.token_ids) for one in sampled],
    }
    return parts | {"step_s": times[-1] - times[0], "samples": len(sampled)}


def _requests(subject: Subject) -> list[SampleRequest]:
    """Return an actor's samples in a step, at most MOST_SAMPLES. Siblings share their prompt."""
    spec, lengths = subject.spec, lengths_of(subject.spec, None)
    share = -(-spec.prompts_per_step // spec.scaling.generation.most_actors)
    prompts = max(min(share, MOST_SAMPLES // spec.samples_per_prompt), 1)
    prompt = max(min(int(lengths.prompt_tokens), subject.asked.sequence_tokens // 2), 1)
    room = min(subject.asked.sequence_tokens - prompt, spec.generation.max_tokens, MOST_TOKENS)
    count = prompts * spec.samples_per_prompt
    drawn = np.random.default_rng(STEP).lognormal(np.log(lengths.median_tokens), lengths.spread, count)
    most = np.clip(drawn, 1, room).astype(int).tolist()
    return [
        SampleRequest(
            f"step{index}", subject.tokens(prompt, 997 * (index // spec.samples_per_prompt)), index, most[index], 1.0
        )
        for index in range(count)
    ]


def compared(subject: Subject, latency_at: Callable[[Lengths], LatencyFile]) -> dict[str, Any] | None:
    """Return the measured step next to its prediction, as `rlhfless plan` makes it for these lengths.

    Returns None if no step was measured.
    """
    found: Mapping[str, Any] | None = subject.results.get("step")
    if found is None:
        return None
    spec, tokens = subject.spec, np.array(found["response_tokens"], float)
    predicted_s: float | None = None
    reason: str | None = "critic, reference and reward models are not started by the self-test"
    if spec.critic is None and not spec.needs_reference and not spec.reward_models:
        one = {"scaling.generation.min_actors": 1, "scaling.generation.max_actors": 1}
        own = {"prompts_per_step": found["prompts"], "mini_batches": 1, "epochs": 1, "schedule": SyncSpec()}
        changed = edited(spec, one | own | {"placement.turns": False})
        asked = replace(subject.asked, spec=changed, given=None)
        spread = float(np.log(tokens).std())
        lengths = Lengths(float(np.median(tokens)), float(tokens.mean()), spread, found["prompt_tokens"], "drawn", True)
        planner = Planner(asked.spec, measured=latency_at(lengths), hurried=True, found_lengths=lengths)
        prediction, reason = planner.predicted(asked)
        predicted_s = None if prediction is None else prediction.cost.step_s
    return {**found, "samples": len(tokens), "predicted_s": predicted_s, "reason": reason}


# -- sleep: the memory that functions free when they take turns on a device, and the time this takes


GIVEN_BACK = 0.9
"""Smallest share of a function's device memory that sleep must free."""

SLACK_BYTES = 2**24
"""Not expected to be freed: partial pages, and memory that allocators keep."""

TURNS = "turns"
"""Result with the seconds of sleep and wake, by function."""


@check("learner asleep", "leave placement.turns at false, and report it with this file", needs=("learner",))
def learner_asleep(subject: Subject) -> Measured:
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
def engine_asleep(subject: Subject) -> Measured:
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
    return measured | check_probe(subject, report, run(own.logprobs(weights.probe.token_ids)))


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
