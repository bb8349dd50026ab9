"""Episodes of several turns in live runs: whatever dies, they have the same tokens, rewards and weights."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fakes import agent_player, commands, saboteur
from fakes.live_runs import fault_opening, fault_values
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import Session
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.records.traces import Comparison, Trace, compare_samples, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1500)]

COMMON: dict[str, Any] = {
    "rewards": [],
    "generation": {"max_tokens": 300, "progress_interval_s": 0.1},
    "recovery": {"lease_s": 12, "heartbeat_s": 6},
}
GAME = {"type": "fakes.agent_game:Game", "turns": 4, "turn_tokens": 40, "sessions": 3, "call_s": 20}


def program_values(log: Path) -> dict[str, Any]:
    """Return the values of a run with an unmodified agent program, which notes the calls of its tool in `log`."""
    command = ["python", agent_player.__file__, "{id}", str(log)]
    program = {"type": "process", "command": command, "turns": 4, "turn_tokens": 40, "sessions": 2, "replicas": 2}
    return {**COMMON, "environment": program, "prompts_per_step": 2}


async def kill_engine(run: RLRun) -> None:
    """Kill the vLLM process of an actor; the actor itself lives."""
    saboteur.engine(run.generation.serving()[0]).kill()


async def kill_environment(run: RLRun) -> None:
    assert run.environment is not None
    os.kill(saboteur.pid(run.environment.replicas()[0]), signal.SIGKILL)


async def kill_worker(run: RLRun) -> None:
    """Kill a process that holds a session."""
    workers_of(run)[0].kill()


async def kill_program(run: RLRun) -> None:
    """Kill an agent program in the middle of its episode."""
    programs = [child for worker in workers_of(run) for child in worker.children()]
    assert programs, "no program runs"
    programs[0].kill()


def workers_of(run: RLRun) -> list[psutil.Process]:
    assert run.environment is not None
    replicas = [psutil.Process(saboteur.pid(replica)) for replica in run.environment.replicas()]
    return [worker for replica in replicas for worker in replica.children()]


Act = Callable[[RLRun], Awaitable[None]]

BROKEN: dict[str, dict[int, tuple[Act, int]]] = {
    "class": {
        1: (saboteur.drain_actor, 0),
        2: (saboteur.kill_actor, 0),
        3: (kill_environment, 0),
        4: (kill_worker, 0),
    },
    "program, sessions": {
        1: (kill_environment, 0),
        2: (kill_environment, 5),
        3: (kill_worker, 1),
        4: (kill_worker, 4),
        5: (kill_program, 3),
    },
    "program, actors": {
        1: (kill_engine, 1),
        2: (saboteur.kill_actor, 4),
        3: (saboteur.drain_actor, 2),
    },
}
"""By what plays, and step: what is done, after how many calls of the step."""

LOSES_SESSIONS = (kill_environment, kill_worker, kill_program)
"""What makes calls be repeated: in new sessions."""


@pytest.mark.parametrize(
    "played",
    ["class", *(pytest.param(f"program, {lost}", marks=pytest.mark.seldom) for lost in ("sessions", "actors"))],
)
def test_episodes_survive_all_kills(played: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = BROKEN[played]
    values: dict[str, dict[str, Any]] = {}
    for name in ("undisturbed", "broken"):
        (tmp_path / name).mkdir()
        game = {**COMMON, "environment": GAME}
        values[name] = game if played == "class" else program_values(tmp_path / f"{name}.log")
        values[name]["steps"] = len(acts) + 2
    monkeypatch.setenv("RLHFLESS_REWARD_LOG", str(tmp_path / "undisturbed.log"))
    start = fault_opening(assets, tmp_path / "undisturbed", actors=1, **values["undisturbed"])
    asyncio.run(execute(start))
    whole = read_trace(tmp_path / "undisturbed" / "trace")
    check_episodes(whole, start)
    step_of = steps_of(whole)
    made = calls_of(tmp_path / "undisturbed.log", step_of)
    assert set(made.values()) == {1}

    log = tmp_path / "broken.log"
    monkeypatch.setenv("RLHFLESS_REWARD_LOG", str(log))

    async def sabotage(run: RLRun) -> None:
        for step, (act, calls) in acts.items():
            await saboteur.generating(run, step)
            await saboteur.until(lambda step=step, calls=calls: in_step(log, step_of, step) >= calls, 300)
            await act(run)

    recovered, digest = asyncio.run(
        saboteur.drive(fault_opening(assets, tmp_path / "broken", actors=2, **values["broken"]), sabotage)
    )
    broken = read_trace(tmp_path / "broken" / "trace")
    samples = len(whole.rollouts)
    assert compare_samples(whole, broken) == Comparison(samples, samples, None, 0, 0)
    assert [row.reward for row in by_key(broken)] == [row.reward for row in by_key(whole)]
    assert digest == last_digest(tmp_path / "undisturbed")
    again = calls_of(log, step_of)
    assert again.keys() == made.keys()
    twice = {step_of[call.split("/")[0]] for call, count in again.items() if count > 1}
    repeated = {step for step, (act, _) in acts.items() if act in LOSES_SESSIONS}
    assert twice <= repeated, "a call was made twice although its session lived"
    assert recovered.replicas_lost >= 2


KILLED_AFTER = {1: 2, 2: 0, 3: 4}
"""By step: the number of its calls after which the driver is killed."""


@pytest.mark.seldom
def test_episodes_of_a_program_survive_killed_drivers(assets: Path, tmp_path: Path) -> None:
    """The driver's private Ray, its actors and sessions die with it. What the programs then repeat are their calls."""
    (tmp_path / "undisturbed").mkdir()
    values = program_values(tmp_path / "undisturbed.log") | {"steps": len(KILLED_AFTER) + 1}
    start = fault_opening(assets, tmp_path / "undisturbed", actors=1, **values)
    asyncio.run(execute(start))
    whole = read_trace(tmp_path / "undisturbed" / "trace")
    step_of = steps_of(whole)

    log, runs = tmp_path / "broken.log", tmp_path / "runs"
    values = fault_values(assets, 1, **program_values(log)) | {"steps": start.spec.steps, "output": str(runs)}
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(values))
    options: tuple[str, ...] = ()
    for step, calls in KILLED_AFTER.items():
        driver = commands.start(spec, tmp_path / f"driver-{step}", *options)
        end = time.monotonic() + 300
        while in_step(log, step_of, step) <= calls:
            assert driver.poll() is None, (tmp_path / f"driver-{step}").read_text()
            assert time.monotonic() < end, (tmp_path / f"driver-{step}").read_text()
            time.sleep(0.02)
        driver.kill()
        driver.wait(timeout=30)
        options = ("--resume", str(next(runs.iterdir())))
    driver = commands.start(spec, tmp_path / "driver", *options)
    assert driver.wait(timeout=400) == 0, (tmp_path / "driver").read_text()

    (folder,) = runs.iterdir()
    broken = read_trace(folder / "trace")
    samples = len(whole.rollouts)
    assert compare_samples(whole, broken) == Comparison(samples, samples, None, 0, 0)
    assert [row.reward for row in by_key(broken)] == [row.reward for row in by_key(whole)]
    assert last_digest(folder) == last_digest(tmp_path / "undisturbed")


def last_digest(folder: Path) -> str:
    """Return the digest of a run's last weights."""
    newest = Checkpoints(folder / "checkpoints", keep_last=9).newest()
    assert newest is not None
    digest: str = newest.notes.digest
    return digest


def steps_of(trace: Trace) -> dict[str, int]:
    """Return the step of each prompt, by the id of its row."""
    id_of = {prompt.prompt_id: prompt.columns["id"] for prompt in trace.prompts}
    return {id_of[row.prompt_id]: row.step for row in trace.rollouts}


def in_step(log: Path, step_of: dict[str, int], step: int) -> int:
    """Return how many different calls of a step have been made."""
    prompts = {prompt for prompt, of in step_of.items() if of == step}
    return len(calls_of(log, prompts)) if log.exists() else 0


def calls_of(log: Path, prompts: Container[str]) -> Counter[str]:
    """Count the calls by prompt, seed and number, without those of evaluations, which repeat their seeds."""
    return Counter(call for call in log.read_text().split() if call.split("/")[0] in prompts)


def by_key(trace: Trace) -> list[Any]:
    return sorted(trace.rollouts, key=lambda row: (row.step, row.prompt_id, row.sample_index))


def check_episodes(trace: Trace, start: Session) -> None:
    """Check each row against its episode."""
    spec = start.spec
    assert spec.environment is not None
    assert len(trace.rollouts) == spec.steps * spec.prompts_per_step * spec.samples_per_prompt
    for row in trace.rollouts:
        episode = row.episode
        assert episode is not None
        assert row.episode_status == episode["status"] == "done"
        assert row.turns == len(episode["turns"]) == 3
        # A program sends what it says after its last turn to nobody.
        assert len(episode["calls"]) == (2 if spec.environment.type == "process" else 3)
        assert row.token_ids is not None
        assert row.response_tokens == len(row.token_ids) == episode["turns"][-1]["end"]
        generated = sum(turn["end"] - turn["start"] for turn in episode["turns"])
        assert row.environment_tokens == row.response_tokens - generated > 0
        assert row.reward_parts == {"environment": row.reward}
        assert row.environment_s >= 3 * 0.05
        waits = [call["wait_s"] for call in episode["calls"]]
        assert row.environment_s == pytest.approx(sum(waits))
