"""Rewards that hang, crash and raise in their worker processes: each marks its own samples, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from fakes.builders import samples_of
from rlhfless.rewards import RewardError, Rewards
from rlhfless.spec import ExactMatchSpec, PythonRewardSpec, ScoringSpec
from rlhfless.util import worker_process

NAUGHTY = """
import ctypes, os, signal, time
def score(response):
    if response == "exit": os._exit(3)
    if response == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "hang": time.sleep(600)
    if response == "raise": raise ValueError("bad response")
    if response == "none": return None
    if response == "nan": return float("nan")
    return len(response)
def batch(response):
    return [score(each) for each in response]
async def later(response):
    return score(response)
def pid(response):
    return os.getpid()
def children(response):
    import subprocess
    return subprocess.Popen(["sleep", "600"]).pid
"""

BAD = {
    "exit": "its worker process died: exit code 3",
    "segfault": "its worker process died: signal SIGSEGV",
    "hang": "it took longer than 0.5 s, and its worker process was killed",
    "raise": "raised ValueError: bad response",
    "none": "returned 'None', not a finite number",
    "nan": "returned 'nan', not a finite number",
}


def spec(name, function, timeout_s=0.5, **options):
    return PythonRewardSpec(type="python", name="mine", target=f"{name}:{function}", timeout_s=timeout_s, **options)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def gone(pid):
    async with asyncio.timeout(60):
        while alive(pid) and "Z" not in _state(pid):
            await asyncio.sleep(0.02)


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


async def test_whatever_a_call_does_it_marks_its_own_sample_only(module, scored):
    responses = [text for bad in BAD for text in (bad, "fine")]
    scores = await scored([spec(module(NAUGHTY), "score")], samples_of(*responses), workers=2)
    for response, score in zip(responses, scores, strict=True):
        if response == "fine":
            assert (score.parts, score.failures) == ({"mine": 4.0}, {})
        else:
            assert score.parts == {}
            assert BAD[response] in score.failures["mine"]
            assert score.total == 0


@pytest.mark.parametrize(("bad", "cause"), [("exit", "exit code 3"), ("raise", "bad response")])
async def test_the_guilty_one_of_a_batch_is_found(module, scored, bad, cause):
    given = [*samples_of("a", "bb", prompt_id="p"), *samples_of("ccc", bad, prompt_id="q")]
    scores = await scored([spec(module(NAUGHTY), "batch", batch=True)], given)
    assert [score.parts.get("mine") for score in scores] == [1.0, 2.0, 3.0, None]
    assert cause in scores[3].failures["mine"]


async def test_the_guilty_one_of_async_calls_is_found(module, scored):
    scores = await scored([spec(module(NAUGHTY), "later")], samples_of("a", "exit", "raise", "bb"))
    assert [score.parts.get("mine") for score in scores] == [1.0, None, None, 2.0]


async def test_what_is_not_scored_in_time_has_failed_and_the_rest_counts(module, scored):
    source = "import time\ndef score(response):\n    time.sleep(600 if response == 'hang' else 0); return 1"
    parts = [
        PythonRewardSpec(type="python", name="mine", target=f"{module(source)}:score"),
        ExactMatchSpec(type="exact_match"),
    ]
    first, second = await scored(parts, samples_of("fine", "hang", answer="hang"), timeout_s=5)
    assert first.parts == {"mine": 1.0, "exact_match": 0.0}
    assert second.parts == {"exact_match": 1.0}
    assert second.failures == {"mine": "not scored within scoring.timeout_s (5 s)"}


async def test_with_zero_a_failed_part_counts_zero(module, scored):
    parts = [spec(module(NAUGHTY), "score", weight=3), ExactMatchSpec(type="exact_match", weight=2)]
    (score,) = await scored(parts, samples_of("none", answer="none"), on_failure="zero")
    assert (score.total, score.parts) == (2.0, {"mine": 0.0, "exact_match": 1.0})
    assert set(score.failures) == {"mine"}


async def test_a_reward_that_cannot_be_made_is_said_at_the_start(module):
    rewards = Rewards([spec(module("raise SystemExit('no licence')"), "score")], ScoringSpec())
    with pytest.raises(RewardError, match=r"reward 'mine': .* SystemExit: no licence"):
        await rewards.start()
    assert rewards.pids == ()


async def test_without_isolated_rewards_there_is_no_process():
    rewards = Rewards([ExactMatchSpec(type="exact_match")], ScoringSpec())
    await rewards.start()
    assert rewards.pids == ()


async def test_close_leaves_no_worker_and_nothing_that_it_started(module):
    rewards = Rewards([spec(module(NAUGHTY), "children")], ScoringSpec(workers=1))
    (score,) = await rewards.score(samples_of("x"))
    (worker,) = rewards.pids
    assert alive(worker)
    rewards.close()
    assert not alive(worker)
    await gone(int(score.parts["mine"]))


async def test_a_parent_that_is_killed_takes_busy_workers_along(module, tmp_path):
    name = module("import os, time\ndef score(path):\n    open(path, 'w').write(str(os.getpid())); time.sleep(600)")
    program = (
        "import asyncio\nfrom rlhfless.rewards import *\nfrom rlhfless.spec import *\n"
        "from rlhfless.records import FinishReason\n"
        f"spec = PythonRewardSpec(type='python', target='{name}:score', kwargs={{'path': {str(tmp_path / 'pid')!r}}})\n"
        "sample = RewardSample('p', 'r', 1, FinishReason.STOP)\n"
        "asyncio.run(Rewards([spec], ScoringSpec(workers=1)).score([sample]))"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)  # noqa: ASYNC220
    async with asyncio.timeout(60):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.05)
    worker = int((tmp_path / "pid").read_text())
    assert alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    await gone(worker)


CHATTY = """
import os, subprocess, sys
def score(response):
    print("a line of stdout")
    print("a line of stderr", file=sys.stderr)
    subprocess.run("yes | head -c 20000000", shell=True)
    return 1
def environment(response):
    return response in os.environ
"""


async def test_what_a_reward_prints_is_named_and_has_an_end(module, scored, capfd):
    (score,) = await scored([spec(module(CHATTY), "score", timeout_s=60)], samples_of("x"))
    assert score.parts == {"mine": 1.0}
    printed = ""
    async with asyncio.timeout(60):
        while "dropped" not in printed:
            printed += capfd.readouterr().err
            await asyncio.sleep(0.02)
    lines = printed.splitlines()
    assert lines[:2] == ["[reward mine] a line of stdout", "[reward mine] a line of stderr"]
    assert lines[2] == "[reward mine] y"
    assert lines[-1] == "[reward mine] has printed more than 256 KiB; further output is dropped"


async def test_the_limit_of_what_is_printed_holds_over_all_processes_of_a_worker(module, capfd, monkeypatch):
    monkeypatch.setattr(worker_process, "PRINTED_KIB", 1)
    source = "import os\ndef score(response):\n    print('y' * 700)\n    os._exit(3)"
    rewards = Rewards([spec(module(source), "score")], ScoringSpec(workers=1))
    await rewards.score(samples_of("a", "b", "c", "d"))
    rewards.close()
    printed = ""
    async with asyncio.timeout(60):
        while "dropped" not in printed:
            printed += capfd.readouterr().err
            await asyncio.sleep(0.02)
    assert printed.count("yyy" * 200) == 2
    assert printed.count("has printed more than 1 KiB") == 1


async def test_a_reward_has_no_variable_that_it_does_not_need(module, scored, monkeypatch):
    kept = {"HOME": "/home/x", "LC_ALL": "C.UTF-8", "HF_HOME": "/cache", "RLHFLESS_REWARD_KEY": "for it", "TZ": "UTC"}
    secrets = ("RLHFLESS_DATABASE", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "WANDB_API_KEY", "ANYTHING")
    for name, value in (kept | dict.fromkeys(secrets, "secret")).items():
        monkeypatch.setenv(name, value)
    names = [*kept, "PATH", *secrets]
    scores = await scored([spec(module(CHATTY), "environment")], samples_of(*names))
    found = {name: score.parts["mine"] == 1 for name, score in zip(names, scores, strict=True)}
    assert found == dict.fromkeys([*kept, "PATH"], True) | dict.fromkeys(secrets, False)
