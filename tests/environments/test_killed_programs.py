"""SIGKILL at each point of an episode that an agent program plays: the same tokens and reward, and nothing hangs. While
its session lives, no call of its tool is made twice."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes.local_environments import END, TOKENIZER, byte_format
from rlhfless.environments.contract import EnvironmentSource
from rlhfless.environments.episode import play_episode
from rlhfless.environments.kept_sessions import KeptSessions
from rlhfless.environments.trajectory import EpisodeLimits, EpisodeTask, GeneratedTurn, Trajectory
from rlhfless.environments.workers import EnvironmentWorkers
from rlhfless.functions.environment.remote import RemoteEnvironment, SessionLeft
from rlhfless.records import EpisodeStatus, FinishReason

PROGRAM = """
import json, os, sys, urllib.request

def ask(messages):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                                     json.dumps({"messages": messages}).encode(),
                                     {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

messages, points = [{"role": "user", "content": "Say a word."}], 0
for turn in range(3):
    said = ask(messages)
    with open(sys.argv[1], "a") as log:
        log.write(f"{turn}:{said}\\n")
    points += len(said)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"You have {points}."}]
print(json.dumps({"reward": points}))
"""
WORDS = ["one", "three", "seven"]
CALLS = {f"{turn}:{word}" for turn, word in enumerate(WORDS)}
LIMITS = EpisodeLimits(call_s=60.0, retries=1)
EVENTS = 10
"""Of an episode: three turns, the messages before each, and two calls, each before and after it is made."""


class Says:
    """A model whose words depend on the turn alone."""

    async def generate(self, token_ids: Any, *, seed: int, max_tokens: int) -> GeneratedTurn:
        word = WORDS[sum(token == END for token in token_ids) // 2]
        return GeneratedTurn(tuple(TOKENIZER.encode(f"{word}<|im_end|>", add_special_tokens=False)), FinishReason.STOP)


@dataclass
class Replica:
    """An environment replica: its workers, and the sessions that outlive actors."""

    log: Path
    workers: EnvironmentWorkers = field(init=False)
    sessions: KeptSessions = field(init=False)

    async def start(self) -> Replica:
        command = (sys.executable, str(self.log.with_name("program.py")), str(self.log))
        self.workers = EnvironmentWorkers(EnvironmentSource("process", command), 1, call_s=60.0, memory_mib=2048)
        self.sessions = KeptSessions(self.workers, idle_s=60.0)
        await self.workers.start()
        return self

    def worker(self) -> psutil.Process:
        return psutil.Process(self.workers.pids[0])


@dataclass
class Actor:
    """Plays an episode, and is lost at an event: nothing of what it knows is left, and it ends no session."""

    replica: Replica
    lost_at: int | None = None
    act: Any = None
    events: list[Any] = field(default_factory=list)

    async def plays(self, attempt: int = 1) -> Trajectory | None:
        async def ask(method: str, key: str, *arguments: Any) -> Any:
            if method == "end":
                await self._event("end")
                return await self.replica.sessions.end(key, *arguments)
            return await self.replica.sessions.ask(key, attempt, *arguments)

        environment = RemoteEnvironment(self.replica.sessions.description, "episode", ask)
        task = EpisodeTask("p", 0, {}, 1)
        try:
            return await play_episode(task, Says(), byte_format(), environment, LIMITS, self._event)
        except SessionLeft:
            return None

    async def _event(self, event: Any) -> None:
        self.events.append(event)
        if len(self.events) - 1 == self.lost_at:
            if self.act is None:
                raise SessionLeft
            self.act()


@pytest.fixture
async def replica(tmp_path: Path) -> Any:
    (tmp_path / "program.py").write_text(PROGRAM)
    started = await Replica(tmp_path / "calls").start()
    yield started
    started.workers.close()


def calls(log: Path) -> Counter[str]:
    made = Counter(log.read_text().split())
    log.unlink()
    return made


def check(episode: Trajectory | None, whole: Trajectory) -> None:
    assert episode is not None
    assert (episode.status, episode.reward) == (EpisodeStatus.DONE, 13.0), episode.cause
    assert episode.token_ids == whole.token_ids
    assert [call.answer for call in episode.calls] == [call.answer for call in whole.calls]


async def test_an_actor_that_is_lost_anywhere_makes_no_call_twice(replica: Replica) -> None:
    undisturbed = Actor(replica)
    whole = await undisturbed.plays()
    check(whole, whole)
    assert (len(undisturbed.events), calls(replica.log)) == (EVENTS + 1, Counter(CALLS))
    for point in range(EVENTS):
        await replica.sessions.close("episode")
        assert await Actor(replica, point).plays() is None
        check(await Actor(replica).plays(), whole)
        assert calls(replica.log) == Counter(CALLS), f"lost at event {point}"
    # The episode had ended when its actor was lost, and the driver does not have it.
    check(await Actor(replica).plays(), whole)
    assert not replica.log.exists()


async def test_a_lost_worker_or_program_is_replaced_wherever_it_is_killed(replica: Replica) -> None:
    whole = await Actor(replica).plays()
    calls(replica.log)

    def kill_worker() -> None:
        replica.worker().kill()

    def kill_program() -> None:
        (program,) = replica.worker().children()
        program.kill()

    for act in (kill_worker, kill_program):
        for point in (0, 3, 5, 9):  # each costs a process
            await replica.sessions.close("episode")
            episode = await Actor(replica, point, act).plays()
            check(episode, whole)
            assert episode is not None
            assert [*map(_signal, episode.failures)] == ["SIGKILL"], f"killed at event {point}"
            made = calls(replica.log)
            assert made.keys() == CALLS
            assert max(made.values()) <= 2


async def test_a_lost_replica_and_a_lost_driver_repeat_the_episode(replica: Replica, tmp_path: Path) -> None:
    whole = await Actor(replica).plays()
    calls(replica.log)
    for point in range(0, EVENTS, 3):
        await replica.sessions.close("episode")
        assert await Actor(replica, point).plays() is None
        left = [replica.worker(), *replica.worker().children(recursive=True)]
        replica.workers.close()  # as with its process: the kernel kills the workers, and these the programs
        _, alive = psutil.wait_procs(left, timeout=20)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
        replica = await Replica(tmp_path / "calls").start()
        check(await Actor(replica).plays(attempt=2), whole)
        assert calls(replica.log).keys() == CALLS
    replica.workers.close()


def _signal(failure: str) -> str:
    return signal.Signals.SIGKILL.name if "SIGKILL" in failure else failure
