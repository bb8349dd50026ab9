"""Environments that hang, crash and raise in worker processes: only their own session is lost, and the cause is
named."""

import asyncio
import os
import re
import signal
from itertools import count

import pytest

from fakes.local_environments import Says, byte_format
from rlhfless.environments.contract import EnvironmentSource
from rlhfless.environments.episode import play_episode
from rlhfless.environments.protocol import EnvironmentFailed
from rlhfless.environments.trajectory import EpisodeLimits, EpisodeStatus, EpisodeTask
from rlhfless.environments.workers import EnvironmentWorkers
from rlhfless.prepare.environment_trial import TrialSettings, try_environment
from rlhfless.spec.errors import InputError

NAUGHTY = """
import asyncio, ctypes, os, socket, time
from rlhfless.environments import ToolError, Turn

class Naughty:
    def reset(self, seed: int, row: dict) -> str:
        return f"{os.getpid()} {'RLHFLESS_KEY' in os.environ}"

    async def do(self, what: str) -> str:
        '''Misbehave.'''
        if what == "loop":
            while True: pass
        if what == "sleep": time.sleep(10**6)
        if what == "wait": await asyncio.sleep(10**6)
        if what == "socket":
            server = socket.create_server(("127.0.0.1", 0))
            socket.create_connection(server.getsockname()).recv(1)
        if what == "fork":
            while os.fork() or not time.sleep(10**6): time.sleep(0.01)
        if what == "exit": os._exit(3)
        if what == "leave": raise SystemExit(4)
        if what == "segfault": ctypes.string_at(0)
        if what == "memory": return "x" * (8 << 30)
        if what == "raise": raise ValueError("bad \\x1b[31m \\udcff http://me:sk-aaaa@host")
        if what == "none": return None
        if what == "object": return object()
        if what == "nan": return Turn("x", float("nan"))
        if what == "refuse": raise ToolError("no")
        return [1, None, "é \\udcff"] if what == "json" else f"did {what}"
"""


@pytest.fixture
async def workers(tmp_path, monkeypatch):
    (tmp_path / "naughty.py").write_text(NAUGHTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHFLESS_KEY", "secret")
    pool = EnvironmentWorkers(EnvironmentSource("naughty.py"), 1, call_s=1.0, memory_mib=512)
    await pool.start()
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("loop", "`do` took longer than call_s (1 s), and its process was killed"),
        ("sleep", "took longer than call_s"),
        ("wait", "took longer than call_s"),
        ("socket", "took longer than call_s"),
        ("exit", "its process died in `do`: exit code 3"),
        ("segfault", "its process died in `do`: signal SIGSEGV"),
        ("leave", "`do` raised SystemExit: 4"),
        ("memory", "needed more memory than memory_mib allows"),
        ("raise", "`do` raised ValueError: bad \\x1b[31m \\udcff http://***@host"),
        ("none", "`do` returned None; a tool returns text"),
        ("object", "neither text nor JSON"),
        ("nan", "gave the reward nan"),
    ],
)
async def test_a_fault_is_named_and_the_next_session_has_another_process(workers, what, words):
    before = workers.pids
    async with workers.session() as session:
        opening = await session.reset(1, {})
        assert opening.messages[0].text == f"{before[0]} False"
        assert (await session.call(1, "do", {"what": "nothing"})).text == "did nothing"
        with pytest.raises(EnvironmentFailed) as error:
            await session.call(2, "do", {"what": what})
        assert words in str(error.value)
        assert "sk-aaaa" not in str(error.value)
        with pytest.raises(EnvironmentFailed, match="process is gone"):
            await session.call(3, "do", {"what": "nothing"})
    async with workers.session() as session:
        assert (await session.reset(1, {})).messages
        assert (await session.call(1, "do", {"what": "nothing"})).text == "did nothing"
        assert workers.pids != before
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_answers_that_are_no_faults_keep_the_process(workers):
    before = workers.pids
    async with workers.session() as session:
        await session.reset(1, {})
        assert (await session.call(1, "do", {"what": "json"})).text == '[1, null, "é \\udcff"]'
        assert (await session.call(2, "do", {"what": "refuse"})).outcome == "refused"
        assert (await session.call(2, "do", {"what": "exit"})).outcome == "refused"  # the answer that was there
        assert (await session.call(3, "do", {"what": 3})).outcome == "invalid"
    async with workers.session() as session:
        await session.reset(1, {})
    assert workers.pids == before


async def test_a_cancelled_call_costs_its_process_only(workers):
    async def play():
        async with workers.session() as session:
            await session.reset(1, {})
            await session.call(1, "do", {"what": "wait"})

    task = asyncio.create_task(play())
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30), workers.session() as session:
        await session.reset(1, {})


async def test_only_the_episodes_of_a_faulty_environment_fail_and_each_is_named(tmp_path, monkeypatch):
    """All at a time, so that none waits for another: a step takes `call_s` longer."""

    def call(what):
        return f'<tool_call>{{"name": "do", "arguments": {{"what": "{what}"}}}}</tool_call><|im_end|>'

    monkeypatch.setattr("rlhfless.environments.workers.MAX_PROCESSES", 40)
    monkeypatch.setattr("rlhfless.environments.workers.WATCH_S", 0.05)
    late = r"`do` took longer than call_s \(6 s\)"
    faults = {
        "exit": "exit code 3", "loop": late, "sleep": late, "socket": late, "none": "returned None",
        "memory": "needed more memory than memory_mib", "fork": r"it had \d+ processes, more than 40, and was killed",
    }  # fmt: skip
    done = [*faults, "a", "b", "c"]
    (tmp_path / "naughty.py").write_text(NAUGHTY)
    pool = EnvironmentWorkers(EnvironmentSource(str(tmp_path / "naughty.py")), len(done), call_s=6.0, memory_mib=512)
    try:
        await pool.start()
        chat, limits = byte_format(pool.description.tools), EpisodeLimits(turns=2, retries=0)
        play = (
            play_episode(EpisodeTask("p", index, {}, index), Says([call(what)]), chat, pool, limits)
            for index, what in zip(count(), done)
        )
        episodes = await asyncio.gather(*play)
    finally:
        pool.close()
    assert all(episode.reward is None for episode in episodes)
    for what, episode in zip(done, episodes, strict=True):
        if what in faults:
            assert re.search(faults[what], episode.cause), (what, episode.cause)
        assert (episode.status is EpisodeStatus.FAILED) == (what in faults), what


async def test_a_failed_episode_is_played_again_on_another_worker(workers):
    chat, limits = byte_format(workers.description.tools), EpisodeLimits(turns=2, retries=1)
    model = Says(['<tool_call>{"name": "do", "arguments": {"what": "exit"}}</tool_call><|im_end|>'])
    episode = await play_episode(EpisodeTask("p", 0, {}, 0), model, chat, workers, limits)
    assert (episode.status, len(episode.failures)) == (EpisodeStatus.FAILED, 2)


async def test_a_file_that_breaks_the_contract_is_refused_at_the_start(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("class Broken:\n    def reset(self, seed, row): ...\n    def f(self, a): 'x'\n")
    pool = EnvironmentWorkers(EnvironmentSource(str(file)), 1, call_s=1.0, memory_mib=512)
    with pytest.raises(InputError, match=r"f\.a: has no type hint"):
        await pool.start()
    pool.close()


UNFAITHFUL = """
import random, time
from rlhfless.environments import Turn

class Base:
    def reset(self, seed: int, row: dict) -> str:
        self.n = 0
        return "go"
    def add(self, number: int) -> str:
        "Add."
        self.n += 1
        return str(self.n)
    def reward(self) -> float:
        return self.n / 10

class Fine(Base):
    replayable = True
    def snapshot(self): return str(self.n).encode()
    def restore(self, state): self.n = int(state)

class OfTurns:
    replayable = True
    def reset(self, seed: int, row: dict) -> str:
        return "go"
    def observe(self, text: str):
        return Turn("on", 0.5)

class Reset(Base):
    def reset(self, seed: int, row: dict) -> str:
        self.n = 0
        return f"go {random.random()}"

class Replay(Base):
    replayable = True
    def add(self, number: int) -> str:
        "Add."
        return str(time.monotonic_ns())

class Reward(Base):
    replayable = True
    def reward(self): return random.random()

class Restore(Base):
    def snapshot(self): return b""
    def restore(self, state): self.n = 0

class State(Base):
    def snapshot(self): return 3
    def restore(self, state): ...

class NotANumber(Base):
    def reward(self): return float("nan")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Fine", None),
        ("OfTurns", None),
        ("Reset", "`reset` is not deterministic: with the same seed it first said 'go 0."),
        ("Replay", "it says `replayable = True`, but a repeated episode differs: call 1 (`add`) first gave"),
        ("Reward", "but a repeated episode differs: the reward was"),
        ("Restore", "`restore` does not bring back what `snapshot` saved: call"),
        ("State", "`snapshot` returned 3, not bytes"),
        ("NotANumber", "`reward` gave the reward nan, not a number"),
    ],
)
def test_a_trial_finds_what_an_environment_promises_and_does_not_keep(tmp_path, monkeypatch, name, words):
    (tmp_path / "unfaithful.py").write_text(UNFAITHFUL)
    monkeypatch.chdir(tmp_path)
    trial = try_environment(
        TrialSettings(
            EnvironmentSource(f"unfaithful.py:{name}"), episodes=2, seed=3, limits=EpisodeLimits(turns=4, retries=0)
        )
    )
    assert len(trial.episodes) == 2
    if words is None:
        assert not trial.faults
    else:
        assert words in " ".join(trial.faults)


COUNTING = """
class Count:
    replayable = True

    def reset(self, seed: int, row: dict) -> str:
        self.n = seed % 100
        return f"Add to {self.n}."

    def add(self, number: int) -> str:
        '''Add.'''
        self.n += number
        return str(self.n)

    def reward(self) -> float:
        return float(self.n)
"""


@pytest.mark.parametrize("replayable", [True, False])
async def test_a_process_that_is_killed_at_any_point_changes_no_token(tmp_path, replayable):
    file = tmp_path / "count.py"
    file.write_text(COUNTING if replayable else COUNTING.replace("replayable = True", ""))
    turns = [f'<tool_call>{{"name": "add", "arguments": {{"number": {n}}}}}</tool_call><|im_end|>' for n in (1, 2)]
    turns.append("done<|im_end|>")
    pool = EnvironmentWorkers(EnvironmentSource(str(file)), 1, call_s=60.0, memory_mib=512)
    await pool.start()
    chat, task = byte_format(pool.description.tools), EpisodeTask("p", 0, {}, 1)

    async def killed_at(point):
        events = count()

        async def journal(event):
            if next(events) == point:
                os.kill(pool.pids[0], signal.SIGKILL)

        model = Says(turns)
        # An episode that starts again asks the model again: it says the same.
        model.texts = [*turns, *turns] if point is None or replayable else _again(turns, point)
        return await play_episode(task, model, chat, pool, EpisodeLimits(retries=1), journal)

    undisturbed = await killed_at(None)
    for point in (0, 2, 3, 6, 8):
        episode = await killed_at(point)
        assert (episode.token_ids, episode.reward) == (undisturbed.token_ids, undisturbed.reward)
        assert len(episode.failures) == 1
    pool.close()


def _again(turns, point):
    """The turns that a model is asked for if the process is killed at an event and the episode starts again."""
    asked = {0: 1, 2: 1, 3: 2, 6: 2, 8: 3}[point]
    return [*turns[:asked], *turns]
