"""A database as a service leaves it after some days: one run in full, others in every status, or many ended runs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import insert
from sqlalchemy.orm import Session

from rlhfless.control.database.tables import EventRow, LeaseRow, MetricsRow, RolloutRow, RunRow, UsageRow
from rlhfless.control.ingest import HELD_OUT_PLACE
from rlhfless.control.lifecycle import ENDED, Status
from rlhfless.control.objects import ReplicaNow
from rlhfless.control.ray_host import RAY_FILE
from rlhfless.control.service import open_database
from rlhfless.control.settings import ServiceSettings
from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, StepRecord, Work
from rlhfless.records.traces import TraceMeta, TraceWriter
from rlhfless.scaling.prices import load_price_book
from rlhfless.spec import RunSpec

KIND = "h200"
USD_PER_HOUR = 3.5
ACTORS, LEARNERS = 5, 2
RUN_ID = "math-grpo-20261123-071502-5f1c09ab"
EARLIER_ID = "math-grpo-20261122-090011-aa10be71"
"""A run that has succeeded, with its own curves."""

PPO_ID = "chat-ppo-20261119-201500-3b1d77e0"
"""A run with a critic."""

WEIGHTS = f"{RUN_ID}/1/230/9c41f20b7d1e4a55b9c0d3e2f1a6b784"

CHAT = (
    "<|im_start|>system\nReason step by step, and put the final answer within \\boxed{{}}.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

TRAIN = "A train leaves at 9:40 and arrives at 13:05. How many minutes does the journey take?"
LEAST = "Let f(x) = x² - 6x + 11. What is the smallest value of f over the real numbers?"
CHAIRS = "A hall has 18 rows of 24 chairs, and 37 of them are broken. How many people can sit?"

SAMPLES: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    (
        TRAIN,
        "From 9:40 to 13:05 are 205 minutes.\n#### 205",
        "<think>From 9:40 to 13:00 are 3 hours and 20 minutes, which is 200 minutes.\nFive more minutes until 13:05.\n"
        "</think>\n\nThe answer is \\boxed{205}.",
        {"math": 1.0, "format": 1.0},
    ),
    (
        TRAIN,
        "From 9:40 to 13:05 are 205 minutes.\n#### 205",
        "<think>13:05 - 9:40 = 3.65 hours, and 3.65 * 60 = 219.</think>\n\nThe answer is \\boxed{219}.",
        {"math": 0.0, "format": 1.0},
    ),
    (
        LEAST,
        "#### 2",
        "<think>Complete the square: x² - 6x + 11 = (x - 3)² + 2. The square is never negative and vanishes at x = 3, "
        "so the smallest value is 2.</think>\n\n\\boxed{2}",
        {"math": 1.0, "format": 1.0},
    ),
    (
        LEAST,
        "#### 2",
        "<think>The derivative is 2x - 6. It vanishes at x = 3. Then f(3) = 9 - 18 + 11 = 2, so I would say that the "
        "minimum is two",
        {"format": 0.0},
    ),
)
"""Question, answer of the data set, response, and rewards by part. Without `math`, that reward has failed."""

HELD_OUT = (
    (CHAIRS, "#### 395", "<think>18 * 24 = 432, less 37.</think>\n\n\\boxed{395}", {"math": 1.0, "format": 1.0}),
    (CHAIRS, "#### 395", "<think>18 * 24 = 422.</think>\n\n\\boxed{385}", {"math": 0.0, "format": 1.0}),
    (CHAIRS, "#### 395", "<think>432 - 37 = 395</think>\n\n\\boxed{395}", {"math": 1.0, "format": 1.0}),
)


def measured(
    steps: int, of: int, start_s: float, step_s: float = 41.0, seed: int = 7
) -> list[tuple[int, float, dict[str, float]]]:
    """Return metrics of the first steps of a run, with an evaluation after each twentieth step."""
    random = np.random.default_rng(seed)
    found, at, cost = [], start_s, 0.0
    for step in range(1, steps + 1):
        done = 1 - math.exp(-step / (0.3 * of))
        noise = random.normal(size=12)
        length = 620 + 900 * done + 25 * noise[0]
        spike = 2.6 if random.random() < 0.012 else 1.0
        generation = (17 + 13 * done + noise[1]) * spike
        learn, reference, sync = 6.4 + 0.004 * length + 0.2 * noise[2], 2.2 + 0.1 * noise[3], 1.1 + 0.05 * abs(noise[4])
        took = (generation + learn + sync + 1.3) * step_s / 41.0
        at, cost = at + took, cost + took / 3600 * USD_PER_HOUR * (ACTORS + LEARNERS) * 0.72
        reward = 0.24 + 0.52 * done + 0.025 * noise[5]
        part = min(0.2 + 0.55 * done + 0.025 * noise[6], 1.0)
        values = {
            "reward_mean": reward,
            "reward_std": 0.45 - 0.16 * done + 0.008 * noise[7],
            "reward/math": part,
            "reward/format": min(0.62 + 0.37 * done, 1.0),
            "failed_rewards": 0.0,
            "groups_without_signal": max(0.08 + 0.2 * done + 0.02 * noise[8], 0.0),
            "prompt_tokens_mean": 112.0,
            "response_tokens_mean": length,
            "response_tokens_max": 4096.0,
            "response_tokens/p10": 0.42 * length,
            "response_tokens/p50": 0.86 * length,
            "response_tokens/p90": 1.78 * length,
            "response_tokens/p99": min(3.1 * length, 4096.0),
            "truncated": max(0.03 - 0.02 * done + 0.003 * noise[9], 0.0),
            "cached_prompt_tokens": 0.86,
            "step_s": took,
            "overhead_s": 0.6,
            "recovery_s": 0.0,
            "generation_s": generation * step_s / 41.0,
            "scoring_s": 0.7,
            "reference_s": reference,
            "learn_s": learn,
            "sync_s": sync,
            "planned_generation_s": (17 + 13 * done) * step_s / 41.0,
            "generation_tokens_per_s": 512 * length / generation,
            "cost_usd": cost,
            "actors": float(ACTORS if step % 9 else ACTORS - 1),
            "moved_samples": float(random.poisson(3)),
            "loss": 0.012 + 0.004 * noise[10],
            "policy_loss": 0.011 + 0.004 * noise[10],
            "learning_rate": 1e-6 * min(step / 10, 1.0),
            "gradient_norm": abs(0.21 + 0.03 * noise[11]),
            "gradient_norm_max": abs(0.21 + 0.03 * noise[11]) + 0.05 * abs(noise[1]),
            "entropy": 0.41 - 0.2 * done,
            "ratio": 1.0,
            "clipped_low": 0.002 + 0.0003 * abs(noise[0]),
            "clipped_high": 0.004 + 0.0005 * abs(noise[2]),
            "old_kl": abs(3e-4 + 1e-4 * noise[2]),
            "reference_kl": abs(0.002 + 0.052 * done + 0.002 * noise[3]),
            "rollout_logprob_difference": abs(0.0031 + 0.0003 * noise[4] + (0.006 if spike > 1 else 0)),
            "rollout_logprob_difference_max": abs(0.21 + 0.05 * noise[5]),
            "importance_weight": 1.0,
        }
        found.append((step, at, values))
        if step % 20 == 0:
            found.append((-step, at + 9, {"eval/math": 0.21 + 0.5 * done, "eval/math_greedy": 0.26 + 0.5 * done}))
    return found


def spec_of(name: str, steps: int) -> dict[str, Any]:
    """Return the spec of a run, with every default."""
    spec = RunSpec.model_validate(
        {
            "name": name,
            "model": {"path": "Qwen/Qwen3-4B"},
            "prompts": {"path": "openai/gsm8k:main"},
            "rewards": [
                {"type": "exact_match", "name": "math"},
                {"type": "regex", "name": "format", "pattern": r"\\boxed\{", "weight": 0.1},
            ],
            "steps": steps,
        }
    )
    return spec.model_dump(mode="json")


OLD = {
    "prompt_id": "old", "sample_index": 0, "prompt": "1+1", "response": "", "finish_reason": "stop", "weights": "v3",
    "response_tokens": 0, "rewards": {"math": None}, "reward": None, "failures": {},
}  # fmt: skip
"""A sample as an earlier version's driver reported it."""

HOSTILE = OLD | {
    "prompt_id": "<b>x</b>",
    "prompt": "[.*] <img src=x onerror=alert(1)> a|b (c",
    "response": "$& </s></s> " + "long " * 3_000 + "\u202eesrever" + "w" * 500,
    "special_tokens": ["</s>", "[.*]", "a|b", "(", "</"],
    "columns": {"<i>": ["<script>alert(1)</script>", {"a": None}], "empty": "", "none": None},
    "expected": {"<u>": "<script>alert(1)</script>"},
    "rewards": {"constructor": 0.0, "__proto__": 1.0},
    "failures": {"<u>": "<script>alert(1)</script>"},
    "reward": -1e9,
}
"""Texts that a careless page would interpret as HTML or as patterns."""


def run_row(folder: Path, run_id: str, status: Status, reason: str, **values: Any) -> RunRow:
    """Return a run with the fields that its status requires."""
    name = run_id.rsplit("-", 3)[0]
    now = time.time()
    created = values.pop("created_at", now - 3600)
    steps = values.pop("steps", 200)
    defaults: dict[str, Any] = {
        "id": run_id,
        "name": name,
        "owner": "local",
        "created_at": created,
        "started_at": created + 95 if values.get("step") else None,
        "finished_at": now - 60 if status in ENDED else None,
        "status": status,
        "status_reason": reason,
        "status_since": created + 95,
        "desired_state": {Status.PAUSED: "pause", Status.CANCELLED: "cancel"}.get(status, "run"),
        "desired_at": created,
        "priority": 0,
        "spec": spec_of(name, steps),
        "resolved": None,
        "run_metadata": {},
        "folder": str(folder / "runs" / run_id),
        "steps": steps,
        "step": 0,
        "latest": {},
        "checkpoints": [],
        "cost_usd": 0.0,
        "device_s": 0.0,
        "simulated_step": values.get("step", 0),  # nothing is left to simulate
        "attempt": 0 if status is Status.QUEUED else 1,
        "deaths": 0,
        "driver": {"number": 0} if status in (Status.RUNNING, Status.PROVISIONING, Status.VALIDATING) else None,
        "driver_token": "",
        "pushed": 0,
        "last_event": 0,
    }
    return RunRow(**(defaults | values))


def fill_run(session: Session, folder: Path, steps: int = 231, of: int = 400, run_id: str = RUN_ID) -> str:
    """Add one running run with all of its data, and return its id."""
    now = time.time()
    start = now - 44.5 * min(steps, 2000)
    rows = measured(steps, of, start, step_s=41.0 if steps < 2000 else 7.0)
    shift = now - 12 - rows[-1][1]
    rows = [(step, at + shift, values) for step, at, values in rows]
    steps_only = [row for row in rows if row[0] > 0]
    last = steps_only[-1][2] | {"eval/math": 0.61, "eval/math_greedy": 0.66, "eval/reward_mean": 0.587}
    run = run_row(
        folder,
        run_id,
        Status.RUNNING,
        f"step {steps + 1} of {of}: generation",
        created_at=rows[0][1] - 140,
        steps=of,
        step=steps,
        latest=last,
        cost_usd=last["cost_usd"],
        device_s=last["cost_usd"] / USD_PER_HOUR * 3600,
        left_s=(of - steps) * last["step_s"],
        run_metadata={"team": "reasoning", "sweep": "lr-3"},
        checkpoints=checkpoints(folder, run_id, steps_only),
        resolved=spec_of("math-grpo", of),
        best_static=static_fleet(steps, last["cost_usd"], rows[-1][1] - rows[0][1]),
        plan=planned(of, last),
    )
    session.add(run)
    session.flush()
    session.execute(insert(MetricsRow), [metrics_row(run_id, *row) for row in rows])
    add_events(session, run, steps_only)
    add_usage(session, run)
    for step in range(max(steps - 5, 1), steps + 1):
        for place, each in enumerate(SAMPLES):
            session.add(RolloutRow(run_id=run_id, step=step, place=place, data=sample(*each, place)))
    for step in range(0, steps + 1, 20):
        for place, each in enumerate(HELD_OUT):
            held_out = {"split": "held_out", "data_set": "amc", "prompt_id": "amc/7", "greedy": place == 2}
            data = sample(*each, place, step=step) | held_out
            session.add(RolloutRow(run_id=run_id, step=step, place=HELD_OUT_PLACE + place, data=data))
    session.add(lease(run_id, ACTORS + LEARNERS, now))
    write_folder(Path(run.folder), run_id, now)
    return run_id


def metrics_row(run_id: str, step: int, at: float, values: dict[str, float]) -> dict[str, Any]:
    """Return a row of a step, or of the evaluation after it if the step is negative."""
    return {
        "run_id": run_id,
        "step": abs(step),
        "kind": "step" if step > 0 else "evaluation",
        "at": at,
        "values": values,
    }


def checkpoints(folder: Path, run_id: str, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the three newest checkpoints; the middle one is the best."""
    kept = [row for row in rows if row[0] % 20 == 0][-3:]
    return [
        {
            "id": f"step-{step:06d}",
            "step": step,
            "location": str(folder / "runs" / run_id / "checkpoints" / f"step-{step:06d}"),
            "best": place == 1,
            "score": values["reward_mean"],
            "created_at": at + 4,
        }
        for place, (step, at, values) in enumerate(kept)
    ]


def static_fleet(steps: int, cost_usd: float, wall_s: float) -> dict[str, Any]:
    """Return the simulator's answer."""
    return {
        "actors": 6,
        "cost_usd": 1.31 * cost_usd,
        "wall_s": 1.02 * wall_s,
        "same_cost_usd": 1.01 * cost_usd,
        "steps": steps,
    }


def planned(of: int, last: dict[str, float]) -> dict[str, Any]:
    """Return the prediction."""
    step_s, step_usd = 0.96 * last["step_s"], last["step_s"] / 3600 * USD_PER_HOUR * (ACTORS + LEARNERS) * 0.7
    return {
        "steps": of,
        "step_s": step_s,
        "wall_s": of * step_s,
        "wall_low_s": 0.85 * of * step_s,
        "wall_high_s": 1.2 * of * step_s,
        "cost_usd": of * step_usd,
        "cost_low_usd": 0.85 * of * step_usd,
        "cost_high_usd": 1.2 * of * step_usd,
    }


def add_events(session: Session, run: RunRow, rows: Sequence[Any]) -> None:
    """Add the run's events so far."""
    began = run.created_at
    told: list[tuple[float, str, str, str, dict[str, Any]]] = [
        (began, "info", "status", "queued", {"status": "queued", "before": None}),
        (began + 1, "info", "status", "starting its driver", {"status": "validating", "before": "queued"}),
        (began + 14, "info", "status", "waiting for devices", {"status": "provisioning", "before": "validating"}),
        (began + 15, "info", "message", "waiting for 7 x h200 for 5 s; 3 of 8 free", {}),
        (began + 58, "warning", "message", "the price of h200 is of 2026-11-21; see prices.yaml", {}),
        (began + 95, "info", "status", "step 1", {"status": "running", "before": "provisioning"}),
    ]
    for step, at, values in rows[-400:]:
        told.append((at, "info", "metrics", f"step {step} of {run.steps}", {"step": step, "metrics": values}))
        if step % 20 == 0:
            told.append((at + 4, "info", "checkpoint", f"saved step-{step:06d}", {"step": step}))
        if step % 97 == 0:
            text = "actor 3 (h200-3) did not answer for 20 s; its 14 samples go on elsewhere"
            told.append((at + 6, "warning", "message", text, {}))
    session.execute(
        insert(EventRow),
        [
            {
                "run_id": run.id,
                "seq": seq,
                "created_at": at,
                "level": level,
                "type": kind,
                "message": message,
                "data": data,
            }
            for seq, (at, level, kind, message, data) in enumerate(told, 1)
        ],
    )
    run.last_event = len(told)


def add_usage(session: Session, run: RunRow) -> None:
    """Add the usage of its functions, which adds up to the run's cost."""
    shares = {
        "generation": (0.66, 0.91, 0.06, 14, 1386),
        "learner": (0.24, 0.72, 0.27, 1, 693),
        "reference": (0.1, 0.58, 0.38, 4, 231),
    }
    for function, (share, busy, idle, starts, calls) in shares.items():
        device_s = share * run.device_s
        row = UsageRow(
            run_id=run.id,
            function=function,
            kind=KIND,
            busy_device_s=busy * device_s,
            idle_device_s=idle * device_s,
            cold_device_s=(1 - busy - idle) * device_s,
            cost_usd=share * run.cost_usd,
            cold_starts=starts,
            invocations=calls,
        )
        session.add(row)


def sample(
    question: str, answer: str, response: str, rewards: dict[str, float], place: int, step: int = 230
) -> dict[str, Any]:
    """Return a sample to read."""
    failed = {} if "math" in rewards else {"math": "the answer was not compared within cpu_s (5 s)"}
    ends = bool(rewards["format"])
    return {
        "split": "train",
        "data_set": "",
        "prompt_id": f"gsm8k/train/{'5e' * 32}/{4100 + place // 2}",
        "sample_index": 3 * place % 8,
        "greedy": False,
        "prompt": CHAT.format(question),
        "columns": {"answer": answer, "level": 2 + place // 2, "source": "gsm8k"},
        "expected": {"math": answer.split("#### ")[-1]},
        "special_tokens": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        "response": response + "<|im_end|>" * ends,
        "finish_reason": "stop" if ends else "length",
        "response_tokens": 40 + len(response) // 3,
        "weights": WEIGHTS.replace("/230/", f"/{step}/"),
        "rewards": rewards,
        "reward": rewards.get("math", 0.0) + 0.1 * rewards["format"],
        "failures": failed,
    }


def lease(run_id: str, count: int, now: float, granted: bool = True, kind: str = KIND) -> LeaseRow:
    """Return a lease of devices that a run holds or waits for."""
    return LeaseRow(
        run_id=run_id,
        kind=kind,
        minimum=min(count, 4),
        maximum=count,
        unit=1,
        granted=count if granted else 0,
        held=count if granted else 0,
        asked_at=now - 41,
    )


def write_folder(folder: Path, run_id: str, now: float, critic: bool = False) -> None:
    """Write logs, and the trace of the last steps."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    lines = [
        f"{stamp}.{100 + line:03d}Z INFO {run_id} rlhfless.orchestrator.driver: step {line}: 32 prompts, 256 samples"
        for line in range(300)
    ]
    (folder / "run.log").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "driver.log").write_text("INFO worker.py: connected to the Ray cluster\n", "utf-8")
    book = load_price_book(None)
    meta = TraceMeta(run_id, 1, book.snapshot(), spec_of("math-grpo", 400), {"host": "node-1"})
    with TraceWriter(folder / "trace", meta, record_tokens=False) as trace:
        for record in records(now, critic=critic):
            trace.add(record)


def records(now: float, steps: int = 8, critic: bool = False) -> list[Holding | Invocation | StepRecord]:
    """Return holdings and calls of the last steps: actors with unequal ends, then a learner; the last actor starts
    late."""
    random = np.random.default_rng(3)
    found: list[Holding | Invocation | StepRecord] = []
    begin = now - 43.0 * steps

    def call(function: FunctionName, replica: str, work: Work, step: int, start: float, end: float) -> None:
        found.append(Invocation(function, replica, f"{replica}.1", work, step, begin + start, begin + end))

    at = 0.0
    for step in range(232 - steps, 232):
        ends = at + 1.4 + np.sort(random.uniform(19, 31, ACTORS))[::-1]
        for actor, end in enumerate(ends):
            call(FunctionName.GENERATION, f"actor-{actor}", Work.LOAD_WEIGHTS, step, at, at + 1.1)
            call(FunctionName.GENERATION, f"actor-{actor}", Work.GENERATE, step, at + 1.4, float(end))
        done = float(ends[0])
        call(FunctionName.SCORING, "scoring-0", Work.SCORE, step, done - 6.0, done + 0.3)
        call(FunctionName.REFERENCE, "reference-0", Work.LOGPROBS, step, done - 4.0, done + 0.5)
        if critic:
            call(FunctionName.CRITIC, "critic-0", Work.LOGPROBS, step, done - 3.0, done + 0.4)
            call(FunctionName.CRITIC, "critic-0", Work.LEARN, step, done + 0.6, done + 4.0)
        call(FunctionName.LEARNER, "learner-0", Work.LEARN, step, done + 0.6, done + 8.9)
        call(FunctionName.LEARNER, "learner-0", Work.PUBLISH, step, done + 8.9, done + 9.8)
        found.append(StepRecord(step, begin + at, begin + done + 10.0, {}))
        at = done + 10.0
    places = [(FunctionName.GENERATION, f"actor-{n}", (f"{KIND}-{n}",)) for n in range(ACTORS)]
    places += [
        (FunctionName.LEARNER, "learner-0", (f"{KIND}-5", f"{KIND}-6")),
        (FunctionName.REFERENCE, "reference-0", (f"{KIND}-7",)),
    ]
    places += [(FunctionName.SCORING, "scoring-0", ("cpu-0",))]
    places += [(FunctionName.CRITIC, "critic-0", ("cpu-1",))] if critic else []
    for function, replica, devices in places:
        for device in devices:
            kind = KIND if device.startswith(KIND) else "cpu-core"
            warm = 17.0 if replica == "actor-4" else 0.0
            for state, since, until in ((ReplicaState.STARTING, 0.0, warm), (ReplicaState.SERVING, warm, at)):
                if until > since:
                    found.append(
                        Holding(
                            function, replica, f"{replica}.1", device, kind, 1.0, state, begin + since, begin + until
                        )
                    )
    return found


def replicas(now: float) -> list[ReplicaNow]:
    """Return the replicas as the run's driver reports them."""
    parts = [("generation", n, [f"{KIND}-{n}"], "serving") for n in range(ACTORS - 1)]
    parts += [
        ("generation", ACTORS - 1, [f"{KIND}-{ACTORS - 1}"], "starting"),
        ("learner", 0, [f"{KIND}-5", f"{KIND}-6"], "serving"),
        ("reference", 0, [f"{KIND}-7"], "stale"),
    ]
    return [
        ReplicaNow(
            function=function,
            replica=f"{RUN_ID}-{function}-{number}",
            state=state,
            since=now - 37.0 * (number + 1),
            weights=WEIGHTS if state == "serving" else None,
            devices=devices,
            kind=KIND,
            node="node-1",
            usd_per_hour=USD_PER_HOUR * len(devices),
        )
        for function, number, devices, state in parts
    ]


def fill_others(session: Session, folder: Path) -> None:
    """Add a run in each other status."""
    now = time.time()
    failure = {
        "code": "invalid",
        "message": "the spec: prompts.path: no such data set 'openai/gsm9k'; did you mean 'openai/gsm8k'?",
        "param": "prompts.path",
        "problems": [],
    }
    rows = [
        run_row(folder, "code-ppo-20261123-101200-7d0e11c4", Status.PROVISIONING,
                "waiting for 2 x h200 for 41 s; 1 of 8 free", created_at=now - 300),
        run_row(folder, "demo-20261123-102907-c3a855f0", Status.QUEUED, "queued",
                created_at=now - 30, steps=60, priority=5),
        run_row(folder, "safety-rm-20261122-181530-19b7d2e6", Status.PAUSED,
                "paused: max_cost_usd: the run has cost 25.01 of 25.00 USD; raise it to resume",
                created_at=now - 50_000, steps=300, step=188, latest={"reward_mean": 0.713, "reward_std": 0.21},
                cost_usd=25.01, device_s=9_220.0),
        run_row(folder, EARLIER_ID, Status.SUCCEEDED,
                "all 400 steps are done; the model is in checkpoints/step-000400", created_at=now - 86_000,
                steps=400, step=400, latest={"reward_mean": 0.764, "reward_std": 0.31, "eval/reward_mean": 0.702},
                cost_usd=41.22, device_s=42_400.0, finished_at=now - 66_000),
        run_row(folder, "gsm-typo-20261121-120000-00c0ffee", Status.FAILED, failure["message"], error=failure,
                created_at=now - 170_000, finished_at=now - 169_980),
        run_row(folder, "lr-sweep-20261121-083000-5eed5eed", Status.CANCELLED, "cancelled", created_at=now - 190_000,
                steps=100, step=37, latest={"reward_mean": -0.082, "reward_std": 0.4}, cost_usd=3.9,
                device_s=4_000.0),
    ]  # fmt: skip
    session.add_all(rows)
    session.flush()
    session.add(lease(rows[0].id, 2, now, granted=False))
    earlier = measured(400, 300, now - 86_000, seed=8)
    session.execute(insert(MetricsRow), [metrics_row(EARLIER_ID, *row) for row in earlier])


def fill_ppo(session: Session, folder: Path, steps: int = 60) -> None:
    """Add a succeeded run with a critic."""
    now = time.time()
    rows = []
    for step, at, values in measured(steps, steps, now - 300_000, seed=9):
        done = 1 - math.exp(-abs(step) / (0.3 * steps))
        critic = {
            "critic_s": 3.4,
            "value_loss": 0.31 - 0.2 * done,
            "explained_variance": -0.2 + 0.9 * done,
            "value_clipped": 0.01,
            "critic_gradient_norm": 1.1 - 0.6 * done,
            "critic_gradient_norm_max": 1.4 - 0.6 * done,
            "critic_learning_rate": 5e-6,
        }
        rows.append((step, at, values | critic if step > 0 else values))
    latest = rows[-2][2] | rows[-1][2]
    run = run_row(folder, PPO_ID, Status.SUCCEEDED, "all 60 steps are done", created_at=now - 300_100, steps=steps,
                  step=steps, latest=latest, cost_usd=4.1, device_s=4_100.0, finished_at=now - 290_000)  # fmt: skip
    session.add(run)
    session.flush()
    session.execute(insert(MetricsRow), [metrics_row(PPO_ID, *row) for row in rows])
    for place, each in enumerate((HOSTILE, OLD)):
        session.add(RolloutRow(run_id=PPO_ID, step=2 - place, place=0, data=each))
    write_folder(Path(run.folder), PPO_ID, now, critic=True)


def fill_crowd(session: Session, folder: Path, count: int) -> None:
    """Add many ended runs."""
    random = np.random.default_rng(1)
    now = time.time()
    names = ("math-grpo", "code-ppo", "safety-rm", "lr-sweep", "demo")
    ends = (Status.SUCCEEDED, Status.SUCCEEDED, Status.SUCCEEDED, Status.CANCELLED, Status.FAILED)
    for number in range(count):
        status = ends[int(random.integers(len(ends)))]
        step = 200 if status is Status.SUCCEEDED else int(random.integers(1, 199))
        created = now - 200_000 - 3_000 * number
        row = run_row(
            folder,
            f"{names[number % len(names)]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(created))}-{number:08x}",
            status,
            f"all {step} steps are done" if status is Status.SUCCEEDED else str(status),
            created_at=created,
            finished_at=created + 9_000,
            step=step,
            latest={"reward_mean": float(random.uniform(0.2, 0.9)), "reward_std": 0.3},
            cost_usd=float(random.uniform(0.5, 60)),
            device_s=float(random.uniform(1e3, 1e5)),
        )
        session.add(row)


def write_ray(folder: Path) -> None:
    """Report a Ray with 8 GPUs and 16 cores for the duration of the tests."""
    devices = {KIND: 8, "cpu-core": 16}
    content = {"address": "127.0.0.1:6379", "pid": os.getpid(), "at": time.time() + 1e6, "nodes": 1}
    (folder / RAY_FILE).write_text(json.dumps(content | {"devices": devices, "free": devices}), "utf-8")


def fill(settings: ServiceSettings, *changes: Callable[[Session, Path], Any]) -> None:
    """Create the database of a service that is not running yet, and Ray's report."""
    database = open_database(settings)
    try:
        with Session(database.engine) as session, session.begin():
            for change in changes:
                change(session, settings.folder)
    finally:
        database.close()
    write_ray(settings.folder)
