"""A whole step of a single actor, to compare with the prediction from the other measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfless.functions.generation.engine import SampleRequest
from rlhfless.planning.memory_plan import edited
from rlhfless.planning.prediction import Lengths, lengths_of
from rlhfless.planning.run_plan import Planner
from rlhfless.selftest import rank_work
from rlhfless.selftest.check import Measured, check
from rlhfless.selftest.engines import publish, running
from rlhfless.selftest.ranks import up
from rlhfless.selftest.subject import Subject
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
