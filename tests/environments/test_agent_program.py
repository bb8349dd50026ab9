"""Programs that are clients of OpenAI's and Anthropic's API, each in an episode of its own: unmodified clients, tokens,
limits, failures."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from fakes.local_environments import TOKENIZER, Says, byte_format, sample_of, text_of
from fakes.repository import ROOT
from rlhfless.environments.agent_program import filled, result_of
from rlhfless.environments.contract import EnvironmentSource
from rlhfless.environments.episode import play_episode
from rlhfless.environments.protocol import EnvironmentFailed
from rlhfless.environments.trajectory import EpisodeLimits, EpisodeTask, Trajectory
from rlhfless.environments.workers import EnvironmentWorkers
from rlhfless.prepare.environment_trial import transcript
from rlhfless.records import EpisodeStatus

AGENT = ROOT / "examples" / "environments" / "agent.py"

ANTHROPIC = """
import json, sys
from anthropic import Anthropic

client = Anthropic()
tools = [{"name": "look", "description": "Look up a key.",
          "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}}}]
messages = [{"role": "user", "content": sys.argv[1]}]
reasons = []
for stream in (False, True, True):
    keys = dict(model="any", max_tokens=100, system="Be short.", messages=messages, tools=tools)
    if stream:
        with client.messages.stream(**keys) as events:
            turn = events.get_final_message()
    else:
        turn = client.messages.create(**keys)
    reasons.append(turn.stop_reason)
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in turn.content]})
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "é=" + block.input["key"]}
               for block in turn.content if block.type == "tool_use"]
    if not results:
        break
    messages.append({"role": "user", "content": [*results[::-1], {"type": "text", "text": "Go on."}]})
assert reasons == ["tool_use", "tool_use", "end_turn"], reasons
print("not the last line")
print(json.dumps({"reward": 0.5, "turns": len(reasons)}))
"""

STREAMS = """
from openai import OpenAI

client = OpenAI()
assert [model.id for model in client.models.list()] == ["policy"]
messages = [{"role": "developer", "content": "Count."}, {"role": "user", "content": [{"type": "text", "text": "Go."}]}]
for expected in ("one", "two"):
    said, usage = "", None
    for chunk in client.chat.completions.create(
        model="any", messages=messages, stream=True, stream_options={"include_usage": True}, temperature=0.3
    ):
        said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert said == expected, said
    assert usage.completion_tokens == len(said) + 1, usage
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
again = client.chat.completions.create(model="any", messages=messages[:-2])  # as after a lost answer
assert again.choices[0].message.content == "two"
"""

RAW = """
import json, os, sys, time, urllib.request, urllib.error

def ask(*messages, key=os.environ["OPENAI_API_KEY"], **more):
    body = json.dumps({"messages": [{"role": r, "content": c} for r, c in messages], **more}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                                     {"Authorization": "Bearer " + key})
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]

exec(sys.argv[1])
"""


async def played(
    folder: Path, command: list[str], *texts: str, row: dict | None = None, **limits
) -> tuple[Trajectory, Says]:
    source = EnvironmentSource("process", tuple(command), str(folder))
    limits = {"call_s": 60.0, "retries": 0, **limits}
    workers = EnvironmentWorkers(source, 1, call_s=limits["call_s"], memory_mib=2048)
    model = Says(texts)
    try:
        await workers.start()
        task = EpisodeTask("prompt", 0, row or {}, 1)
        episode = await play_episode(task, model, byte_format(), workers, EpisodeLimits(**limits))
    finally:
        workers.close()
    assert [tokens for tokens, _ in episode.prompts()] == model.read
    return episode, model


async def ran(tmp_path: Path, code: str, *texts: str, **limits) -> Trajectory:
    """Play an episode of a program that talks HTTP by hand."""
    (tmp_path / "raw.py").write_text(RAW)
    return (await played(tmp_path, [sys.executable, "raw.py", code], *texts, **limits))[0]


def call(expression: str) -> str:
    called = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return f"<think>hm</think>Let me see.\n<tool_call>{called}</tool_call><|im_end|>"


async def test_two_unmodified_openai_agents_at_a_time_with_the_tokens_of_their_transcripts():
    source = EnvironmentSource("process", ("python", str(AGENT), "{question}", "{answer}"))
    workers = EnvironmentWorkers(source, 2, call_s=60.0, memory_mib=2048)
    games = [
        ({"question": "What is 17 * 23?", "answer": "391"}, [call("17 * 23"), "391<|im_end|>"], "391", 1.0),
        ({"question": "2 ** 2?", "answer": 4}, [call("2 ** 2"), "5<|im_end|>"], "error: only + - *", 0.0),
    ]  # fmt: skip
    models = [Says(texts) for _, texts, _, _ in games]
    try:
        await workers.start()
        episodes = await asyncio.gather(
            *(
                play_episode(EpisodeTask(str(n), 0, row, n), model, byte_format(), workers, EpisodeLimits(call_s=60.0))
                for n, ((row, *_), model) in enumerate(zip(games, models, strict=True))
            )
        )
    finally:
        workers.close()
    for episode, model, (row, texts, result, reward) in zip(episodes, models, games, strict=True):
        assert (episode.status, episode.reward) == (EpisodeStatus.DONE, reward), episode.cause
        assert [tokens for tokens, _ in episode.prompts()] == model.read
        text = text_of(episode.token_ids)
        assert "calculate" in text.partition("<|im_end|>")[0]
        asked = f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n{texts[0]}"
        assert f"{asked}\n<|im_start|>tool\n{result}" in text
        assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{texts[1]}")
        assert [(each.tool, each.turn) for each in episode.calls] == [("calculate", 0)]
        assert episode.calls[0].answer.text.startswith(result)


async def test_an_unmodified_anthropic_client_with_and_without_a_stream(tmp_path):
    (tmp_path / "agent.py").write_text(ANTHROPIC)
    look = [f'<tool_call>{{"name": "look", "arguments": {{"key": "{key}"}}}}</tool_call>' for key in "abc"]
    texts = [f"{look[0]}{look[1]}<|im_end|>", f"{look[2]}<|im_end|>", "done<|im_end|>"]
    episode, _ = await played(tmp_path, [sys.executable, "agent.py", "{what}"], *texts, row={"what": "Look."})
    assert (episode.status, episode.reward, dict(episode.parts)) == (EpisodeStatus.DONE, 0.5, {"turns": 3.0})
    # The results are in the order of the calls, although the client wrote them the other way round.
    assert "<|im_start|>tool\né=a<|im_end|>\n<|im_start|>tool\né=b<|im_end|>\n<|im_start|>user\nGo on." in text_of(
        episode.token_ids
    )
    given = [(each.tool, each.answer.text) for each in episode.calls]
    assert given == [("look", "é=a"), ("look", "é=b"), ("", "Go on."), ("look", "é=c"), ("", "Go on.")]


async def test_streams_models_and_a_repeated_request(tmp_path):
    (tmp_path / "agent.py").write_text(STREAMS)
    episode, model = await played(tmp_path, [sys.executable, "agent.py"], "one<|im_end|>", "two<|im_end|>")
    assert (episode.status, episode.reward, episode.cause) == (EpisodeStatus.DONE, None, "")
    assert len(model.read) == 2
    text = text_of(episode.token_ids)
    assert "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>" in text


async def test_requests_that_cannot_be_answered_are_refused(tmp_path):
    checked = """
invalid = (400, "invalid_request")
assert ask(("user", "a"), max_tokens=2) == "on"
assert ask(("user", "a"), ("assistant", "on"), ("user", "b"), n=2) == invalid
assert ask(("user", "a"), ("assistant", "on")) == invalid
assert ask(("user", "b"), key="no") == (401, "invalid_api_key")
assert ask(("user", "a"), ("assistant", "on"), ("user", "b")) == "two"
more = [("user", "b"), ("assistant", "two"), ("user", "c")]
assert ask(("user", "a"), ("assistant", "on"), *more) == (400, "episode_over")
sys.exit(3)
"""
    episode = await ran(tmp_path, checked, "one<|im_end|>", "two<|im_end|>", turns=2)
    assert (episode.status, episode.reward) == (EpisodeStatus.TURNS, None), episode.cause
    assert [turn.generated.finish_reason for turn in episode.turns] == ["length", "stop"]


SUB_AGENT = """
tools = [{"type": "function", "function": {"name": "f"}}]
task = [("system", "Lead."), ("user", "Go.")]
assert ask(*task) == "plan"
assert ask(("system", "Help."), ("user", "What?"), tools=tools) == "an answer"
assert ask(("system", "Help."), ("user", "What?"), ("assistant", "an answer"), ("user", "Sure?"), tools=tools) == "yes"
task += [("assistant", "plan"), ("user", "They say yes.")]
assert ask(*task) == "more"
assert ask(*task) == "more"  # again
assert ask(("system", "Lead."), ("user", "So far: plan, more."), ("user", "Go on.")) == "done"
print(json.dumps({"reward": 1}))
"""


async def test_a_sub_agent_and_a_shortened_history_are_conversations_of_one_episode(tmp_path):
    said = ["plan", "an answer", "yes", "more", "done"]
    episode = await ran(tmp_path, SUB_AGENT, *(f"{text}<|im_end|>" for text in said))
    assert (episode.status, episode.reward) == (EpisodeStatus.DONE, 1.0), episode.cause
    assert [turn.conversation for turn in episode.turns] == [0, 1, 1, 0, 2]
    read = [text_of(tokens) for tokens, _ in episode.prompts()]
    lead = "<|im_start|>system\nLead.<|im_end|>\n<|im_start|>user\n"
    assert read[3] == (
        f"{lead}Go.<|im_end|>\n<|im_start|>assistant\nplan<|im_end|>\n"
        "<|im_start|>user\nThey say yes.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert read[2].endswith(
        "assistant\nan answer<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Help." in read[1]
    assert read[4].startswith(f"{lead}So far: plan, more.<|im_end|>")
    sample = sample_of(episode)
    learned = [
        "".join(f"{text}<|im_end|>" for text in part) for part in (["plan", "more"], ["an answer", "yes"], ["done"])
    ]
    assert [text_of(part.token_ids) for part in sample.rollouts] == [f"{said[i]}<|im_end|>" for i in (0, 3, 1, 2, 4)]
    assert "".join(text_of(part.token_ids) for part in sample.rollouts) == "".join(learned)
    speakers = [who for who, _ in transcript(episode, TOKENIZER)]
    assert speakers[:4] == ["prompt", "model, turn 1", "prompt, conversation 2", "model, turn 2, conversation 2"]
    record = episode.episode()
    assert record.conversations == 3
    assert record.contexts() == [len(tokens) for tokens, _ in episode.prompts()]
    assert [(each.turn, each.text) for each in record.calls] == [(1, "Sure?"), (0, "They say yes.")]


TOKENS = """
def generate(*tokens, **more):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/inference/v1/generate"
    body = json.dumps({"token_ids": tokens, "sampling_params": {"temperature": 1.0, "logprobs": 1}, **more}).encode()
    request = urllib.request.Request(url, body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
                                                 "X-Session-ID": "any"})
    try:
        with urllib.request.urlopen(request) as response:
            (choice,) = json.load(response)["choices"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]
    assert [each["token_id"] for each in choice["logprobs"]["content"]] == choice["token_ids"]
    assert len({each["logprob"] for each in choice["logprobs"]["content"]}) == 1
    return choice["token_ids"], choice["finish_reason"]

first, reason = generate(5, 6, 7)
assert reason == "stop"
assert generate(5, 6, 7) == (first, "stop")  # again
second, _ = generate(5, 6, 7, *first, 8, 9)
other, _ = generate(5, 6, 8)  # another conversation
assert ask(("user", "a")) == "four"  # of messages
cut, reason = generate(5, 6, 7, *first, 8, 9, *second, 4, sampling_params={"max_tokens": 2})
assert (len(cut), reason) == (2, "length")
invalid = (400, "invalid_request")
assert generate() == generate("a") == generate(-1) == generate(True) == generate(5, output_mode="text") == invalid
assert generate(5, sampling_params={"n": 2}) == generate(5, sampling_params={"max_tokens": 0}) == invalid
print(json.dumps({"reward": len(first)}))
"""


async def test_a_client_that_sends_tokens_gets_tokens_and_logprobs(tmp_path):
    said = [f"{text}<|im_end|>" for text in ("one", "second", "third", "four", "fifth")]
    (tmp_path / "raw.py").write_text(RAW)
    episode, model = await played(tmp_path, [sys.executable, "raw.py", TOKENS], *said)
    assert (episode.status, episode.reward) == (EpisodeStatus.DONE, 4.0), episode.cause
    assert [turn.conversation for turn in episode.turns] == [0, 0, 1, 2, 0]
    first, second = (turn.token_ids for turn in episode.turns[:2])
    assert model.read[:3] == [(5, 6, 7), (5, 6, 7, *first, 8, 9), (5, 6, 8)]
    assert model.read[4] == (5, 6, 7, *first, 8, 9, *second, 4)
    assert [(each.turn, each.answer.text) for each in episode.calls] == [(0, text_of([8, 9])), (1, text_of([4]))]
    failed = await ran(tmp_path, f"{TOKENS.partition('first, reason')[0]}generate(10**6)", *said)
    assert (failed.status, "token id 1000000" in failed.cause) == (EpisodeStatus.FAILED, True)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("ask(('user', 'a')); print('lost it'); sys.exit(3)", r"ended with exit code 3: lost it"),
        ("ask(('user', 'a')); 1 / 0", "ended with exit code 1: .*ZeroDivisionError"),
        ("ask(('user', 'a')); os.kill(os.getpid(), 9)", "ended with signal SIGKILL"),
        ("pass", "without a turn of the model"),
        ("ask(('user', 'a')); print(json.dumps({'reward': 'much'}))", "gave the reward 'much'"),
        ("ask(('user', 'a')); time.sleep(60)", r"took longer than call_s \(2 s\)"),
    ],
)
async def test_a_program_that_fails_has_no_reward(tmp_path, code, cause):
    limits = {"call_s": 2.0} if "call_s" in cause else {}
    episode = await ran(tmp_path, code, "one<|im_end|>", **limits)
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert re.search(cause, episode.cause.replace("\n", " ")), episode.cause


async def test_nothing_of_a_program_outlives_its_episode(tmp_path):
    """Neither what it started, in a session of its own too, nor a program that is in the middle of something when time
    is over."""
    spawn = """
import subprocess
own = [subprocess.Popen(["sleep", "1234"], start_new_session=apart) for apart in (False, True)]
left = subprocess.run("setsid sleep 1234 & echo $!", shell=True, stdout=subprocess.PIPE).stdout
open("pids", "a").write(f"{own[0].pid} {own[1].pid} {int(left)} ")
ask(("user", "a"))
"""
    spawn = spawn.replace("& echo $!", "</dev/null >/dev/null 2>&1 & echo $!")
    episode = await ran(tmp_path, spawn, "one<|im_end|>")
    assert episode.status is EpisodeStatus.DONE, episode.cause
    began_s = time.monotonic()
    late = await ran(tmp_path, f"{spawn}time.sleep(1234)", "one<|im_end|>", episode_s=6.0)
    assert (late.status, late.reward) == (EpisodeStatus.TIME, None)
    assert time.monotonic() - began_s < 60
    pids = [*map(int, (tmp_path / "pids").read_text().split())]
    assert len(pids) == 6
    for each in pids:
        assert not psutil.pid_exists(each) or psutil.Process(each).status() == psutil.STATUS_ZOMBIE


async def test_a_program_ends_with_its_worker(tmp_path):
    (tmp_path / "raw.py").write_text(RAW)
    code = """
import subprocess
apart = subprocess.Popen(["sleep", "1234"], start_new_session=True)
ask(("user", "a")); open("pid", "w").write(f"{os.getpid()} {apart.pid}"); time.sleep(1234)
"""
    source = EnvironmentSource("process", (sys.executable, "raw.py", code), str(tmp_path))
    workers = EnvironmentWorkers(source, 1, call_s=60.0, memory_mib=2048)
    try:
        await workers.start()
        limits = EpisodeLimits(call_s=60.0, retries=0)
        playing = asyncio.create_task(
            play_episode(EpisodeTask("p", 0, {}, 1), Says(["one<|im_end|>"]), byte_format(), workers, limits)
        )
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.05)
        program, apart = (psutil.Process(int(pid)) for pid in (tmp_path / "pid").read_text().split())
        (worker,) = workers.pids
        os.kill(worker, signal.SIGKILL)
        psutil.wait_procs([program], timeout=20)  # the loop of this process, which would kill it, does not run
        assert not program.is_running() or program.status() == psutil.STATUS_ZOMBIE
        episode = await playing
        psutil.wait_procs([apart], timeout=20)
        assert not apart.is_running() or apart.status() == psutil.STATUS_ZOMBIE
    finally:
        workers.close()
    assert (episode.status, episode.cause) == (EpisodeStatus.FAILED, "its process died in `play`: signal SIGKILL")


async def test_a_program_gets_its_task_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = """
task = json.load(open(os.environ["RLHFLESS_TASK"]))
assert task["row"] == {"what": "é"}, task
assert "HF_TOKEN" not in os.environ
assert "PYTHONPATH" not in os.environ
ask(("user", sys.argv[2] + str(task["seed"] > 0)))
"""
    (tmp_path / "raw.py").write_text(RAW)
    command = [sys.executable, "raw.py", code, '{what} ${HOME} {"a": 1}']
    episode, _ = await played(tmp_path, command, "one<|im_end|>", row={"what": "é"})
    assert '<|im_start|>user\né ${HOME} {"a": 1}True<|im_end|>' in text_of(episode.token_ids), episode.cause


def test_arguments_are_filled_with_columns():
    assert filled(["python", "{a}-{b}"], {"a": "x", "b": [1]}) == [sys.executable, "x-[1]"]
    with pytest.raises(EnvironmentFailed, match=r"has \{tsk\}, which is no column; did you mean"):
        filled(["program", "{tsk}"], {"task": "x"})


@pytest.mark.parametrize(
    ("printed", "result"),
    [
        ('log\n{"reward": 1, "b": 2}\n\n', {"reward": 1, "b": 2}),
        ('{"reward": 1}\nbye', None),
        ("391", None),
        ('{"score": 1}', None),
        ("", None),
    ],
)
def test_the_reward_is_the_last_line(printed, result):
    assert result_of(printed) == result
