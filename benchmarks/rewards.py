"""Rewards per minute through a scoring replica, against the same work in a plain loop.

    python benchmarks/rewards.py [--reward math|code] [--prompts N] [--rounds N] [--workers N] [--smoke]

Ours is the whole path of a run: a Ray Serve replica with its worker processes, called with groups of 8 samples, 32
groups a call; the time is that of the caller, transport included. The plain loop parses expected answer and response
and compares them, one sample after the other in this process, as reward functions of trainers do. Both see the same
samples in the same order, in turns.

`--reward code`: one test per response; the plain loop starts `python -I` for each, without any confinement.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from math_verify import parse, verify
from setting import median_ratio, spread
from smoke import parsed
from where import machine

from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica
from rlhfless.fleet.replicas import Blueprint
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.functions.base import Call
from rlhfless.functions.launching import binding
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.scoring.deployment import ScoringFunction, ScoringSettings
from rlhfless.records import Decision, FinishReason, FunctionName, Group, Holding, Invocation, Prompt, Rollout
from rlhfless.scaling.function_kinds import Bounds, declared
from rlhfless.scaling.placement import Allocation, Site, Wanted
from rlhfless.scaling.placing import place
from rlhfless.spec import CodeSpec, MathSpec, PlacementSpec, RunSpec, ScoringSpec

SAMPLES = 8
GROUPS_PER_CALL = 32
CALL = Call("bench", 1, 1)
SPEC = RunSpec.model_validate(
    {
        "model": {"path": "m"},
        "prompts": {"path": "p"},
        "rewards": [{"type": "exact_match"}],
        "recovery": {"lease_s": 600},
    }
)

REASONING = (
    "Let us write $x = {a}$ and $y = {b}$. Then $x + y = {c}$, and with $\\frac{{x}}{{y}}$ we get a ratio. "
    "Squaring both sides gives $x^2 + 2xy + y^2 = {d}$. We check the case $y = 0$ too, which is not possible. "
)


class NoLedger:
    """A benchmark keeps no books."""

    def add_holding(self, holding: Holding) -> None: ...

    def add_invocation(self, invocation: Invocation) -> None: ...

    def add_decision(self, decision: Decision) -> None: ...


def groups_of(prompts: int) -> list[Group]:
    """Prompts with expected answers of four kinds, and responses of some 700 characters, half of them right."""
    draw = random.Random(0)
    return [_group(f"p{index:05d}", draw) for index in range(prompts)]


def _group(name: str, draw: random.Random) -> Group:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    answer, wrong = draw.choice(
        [
            (str(a * b), str(a * b + 1)),
            (f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{a + 1}}}{{{b}}}"),
            (f"{a}\\sqrt{{{b}}}", f"{b}\\sqrt{{{a}}} + 1"),
            (f"x^2 + {a}x + {b}", f"x^2 + {a}x - {b}"),
        ]
    )
    text = REASONING.format(a=a, b=b, c=a + b, d=(a + b) ** 2) * 3
    responses = [f"{text}So the answer is $\\boxed{{{draw.choice([answer, wrong])}}}$." for _ in range(SAMPLES)]
    prompt = Prompt(name, (1,), "What is it?", {"answer": answer})
    return Group.of(prompt, tuple(_rollout(name, index, text) for index, text in enumerate(responses)))


def code_groups_of(prompts: int) -> list[Group]:
    """Small functions with one assert each, half of them right."""
    draw = random.Random(0)
    groups = []
    for index in range(prompts):
        name, factor = f"p{index:05d}", draw.randint(2, 99)
        codes = [f"def f(x):\n    return x * {draw.choice([factor, factor + 1])}\n" for _ in range(SAMPLES)]
        prompt = Prompt(name, (1,), "Write f.", {"tests": f"assert f(3) == {3 * factor}"})
        groups.append(Group.of(prompt, tuple(_rollout(name, number, code) for number, code in enumerate(codes))))
    return groups


def _rollout(name: str, index: int, text: str) -> Rollout:
    tokens = np.zeros(256, np.int64)
    logprobs = np.zeros(256, np.float32)
    return Rollout(name, index, 0, tokens, logprobs, text, FinishReason.STOP, (), "bench", 0.0, 1.0)


def plain_loop(groups: Sequence[Group]) -> tuple[float, float]:
    """Seconds, and the mean reward."""
    began = time.perf_counter()
    right = [
        verify(parse(f"${group.prompt.columns['answer']}$"), parse(rollout.text))
        for group in groups
        for rollout in group.rollouts
    ]
    return time.perf_counter() - began, float(np.mean(right))


def plain_code_loop(groups: Sequence[Group]) -> tuple[float, float]:
    """Seconds, and the mean reward."""
    began = time.perf_counter()
    right = [
        subprocess.run(
            [sys.executable, "-I", "-c", f"{rollout.text}\n{group.prompt.columns['tests']}"],
            capture_output=True,
            timeout=60,
        ).returncode
        == 0
        for group in groups
        for rollout in group.rollouts
    ]
    return time.perf_counter() - began, float(np.mean(right))


async def ours(replica: Replica, groups: Sequence[Group]) -> tuple[float, float]:
    """Seconds, and the mean reward."""
    began = time.perf_counter()
    totals: list[float] = []
    for first in range(0, len(groups), GROUPS_PER_CALL):
        batch = groups[first : first + GROUPS_PER_CALL]
        scores = await replica.call("score", CALL, batch, timeout_s=300, waiting_for="scores")
        totals += [score.total for of_group in scores for score in of_group]
    return time.perf_counter() - began, float(np.mean(totals))


async def measure(reward: str, prompts: int, rounds: int, workers: int) -> None:
    code = reward == "code"
    groups = code_groups_of(prompts) if code else groups_of(prompts)
    loop = plain_code_loop if code else plain_loop
    samples = prompts * SAMPLES
    cluster = await Cluster.start(PlacementSpec(), Path(tempfile.mkdtemp()))
    nodes = await cluster.nodes(None)
    placement = place(
        PlacementSpec(devices=1),
        nodes,
        [Wanted(FunctionName.GENERATION, Site.WINDOWS), Wanted(FunctionName.SCORING, Site.CORES)],
    )
    devices = RunDevices(cluster, placement, CALL, SPEC, 0, lambda _: nullcontext())

    def settings(allocation: Allocation) -> ScoringSettings:
        rewards = (CodeSpec(type="code") if code else MathSpec(type="math"),)
        return ScoringSettings(
            run_id="bench",
            lease=LeaseTerms(600, 600),
            rewards=rewards,
            scoring=ScoringSpec(workers=workers),
            binding=binding(allocation.devices, exclusive=False),
        )

    blueprint = Blueprint(
        declared()[FunctionName.SCORING],
        ScoringFunction,
        settings,
        placement.allocations[FunctionName.SCORING],
        Bounds(),
    )
    pool = ReplicaPool(cluster, devices, blueprint, CALL, SPEC.timeouts, NoLedger())
    figures: dict[str, list[float]] = {"ours": [], "plain loop": []}
    try:
        replica = await pool.ready(CALL)
        for number in range(rounds + 1):
            plain_s, plain_mean = loop(groups)
            ours_s, ours_mean = await ours(replica, groups)
            if abs(plain_mean - ours_mean) > 1e-9:
                raise SystemExit(f"mean rewards differ: {ours_mean} here, {plain_mean} in the plain loop")
            if number:  # the first round warms caches up
                figures["ours"].append(60 * samples / ours_s)
                figures["plain loop"].append(60 * samples / plain_s)
    finally:
        await pool.stop(*pool.replicas())
        await cluster.stop()
    for name, values in figures.items():
        print(f"{name:12} rewards/min {spread(values)}")
    print(f"ours / plain loop  {median_ratio(figures['ours'], figures['plain loop']):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reward", choices=["math", "code"], default="math")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=ScoringSpec().workers)
    arguments = parsed(parser, prompts=8, rounds=1, workers=1)
    print(
        f"{machine()}; {arguments.reward}, {arguments.prompts} prompts x {SAMPLES} samples, {arguments.workers} workers"
    )
    asyncio.run(measure(arguments.reward, arguments.prompts, arguments.rounds, arguments.workers))


if __name__ == "__main__":
    main()
