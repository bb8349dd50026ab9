"""Episodes on generation actors: wherever one is aborted, another actor continues it with the same tokens, and no call
is made twice."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fakes.local_environments import END, TOKENIZER, LocalEnvironments, byte_format
from rlhfless.environments.kept_sessions import KeptSessions
from rlhfless.environments.protocol import EnvironmentFailed
from rlhfless.functions.calls import Call
from rlhfless.functions.environment.remote import EnvironmentReplicas, SessionLeft
from rlhfless.functions.generation.engine import Sampled
from rlhfless.functions.generation.episodes import EpisodeRollouter, EpisodeSettings
from rlhfless.functions.generation.messages import GenerateRequest, SampleItem, Sampling
from rlhfless.functions.generation.rollouter import Response, SampleTask
from rlhfless.records import Episode, EpisodeStatus, FinishReason, Group, Prompt, Rollout, VersionSpan
from rlhfless.spec import EnvironmentSpec, ModelSpec

TEXTS = [
    '<tool_call>{"name": "add", "arguments": {"number": 3}}</tool_call><|im_end|>',
    '<tool_call>{"name": "add", "arguments": {"number": 4}}</tool_call><|im_end|>',
    "The sum is 7.<|im_end|>",
]
ROW = {"prompt": "Hi", "what": "the list"}
MADE: list[int] = []
"""Calls that an environment has executed."""


class Sums:
    def reset(self, seed: int, row: dict) -> str:
        self.total = 0
        return f"Add the numbers of {row['what']}."

    async def add(self, number: int) -> str:
        """Add a number."""
        MADE.append(number)
        await asyncio.sleep(0)
        self.total += number
        return f"total {self.total}"

    def reward(self) -> float:
        return float(self.total)


async def looped(task: Any, model: Any) -> float:
    first = await model.turn([{"role": "user", "content": "Say something."}])
    MADE.append(1)
    second = await model.turn([{"role": "user", "content": f"You said {len(first.content)} characters."}])
    MADE.append(2)
    return float(len(second.content))


async def helped(task: Any, model: Any) -> float:
    """Two conversations, whose turns lie among each other."""
    lead, help_ = [[{"role": "user", "content": what}] for what in ("Lead.", "Help.")]
    for number, said in enumerate((lead, help_, lead)):
        answer = await model.chat(said)
        said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": f"{number}."}]
        MADE.append(number)
    return float(len(lead))


PLAYED = [(Sums, TEXTS), (looped, ["one<|im_end|>", "four<|im_end|>"]), (helped, ["word<|im_end|>"] * 9)]


@dataclass
class Actor:
    """An engine that says given texts, turn by turn, and aborts after some of its tokens and answers."""

    sessions: KeptSessions
    texts: list[str]
    budget: int = 10**6
    """What may happen until the sample is aborted: each token, and each answer of the environment, is one."""
    temperature: float = 1.0
    park_s: float = 60.0
    asked: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Per turn: seed, max_tokens, generated and response."""

    async def plays(self, prior: Rollout | None = None, attempt: int = 1) -> Response:
        task: SampleTask

        async def generate(token_ids: Any, *, seed: int, max_tokens: int, generated: int, response: int) -> Sampled:
            self.asked.append((seed, max_tokens, generated, response))
            text = self.texts[sum(token == END for token in token_ids[-response:]) // 2 if response else 0]
            ids = TOKENIZER.encode(text, add_special_tokens=False)[generated:]
            cut = ids[: self.budget] if not task.aborted.is_set() else []
            self.budget -= len(ids)
            reason = FinishReason.ABORT if len(cut) < len(ids) else FinishReason.STOP
            spans = (VersionSpan("v", 0, len(cut)),) if cut else ()
            return Sampled("", tuple(cut), (-1.0,) * len(cut), reason, spans, 0, text)

        async def ask(replica: str, call: Call, method: str, *arguments: Any) -> Any:
            assert replica == "environment-1"
            self.budget -= 1
            if self.budget < 0:
                task.aborted.set()
                await asyncio.sleep(0)
            if method == "about":
                return self.sessions.description
            if method == "end":
                return await self.sessions.end(*arguments)
            return await self.sessions.ask(arguments[0], call.attempt, *arguments[1:])

        item = SampleItem("p", 0, (1, 2), seed=5, row=ROW, session=f"p/{self.temperature:g}", prior=prior)
        request = GenerateRequest(
            (item,), Sampling(2000, self.temperature), "v", "actor", 1.0, 60.0, 60.0, environments=("environment-1",)
        )
        task = SampleTask(item, request, Call("run", attempt, 1), generate)
        spec = EnvironmentSpec(type="sums:Sums", turn_tokens=200, retries=0, park_s=self.park_s)
        settings = EpisodeSettings(spec, ModelSpec(path="m"), "prompt", chat_template=True, chat_template_kwargs={})
        return await EpisodeRollouter(settings, byte_format(), EnvironmentReplicas(ask)).finish(task)


def rollout_of(response: Response) -> Rollout:
    sampled = response.sampled
    return Rollout(
        "p", 0, 5, np.array(sampled.token_ids, np.int64), np.array(sampled.logprobs, np.float32), sampled.text,
        sampled.finish_reason, sampled.version_spans, "actor", 0.0, 1.0, episode=response.episode,
    )  # fmt: skip


def sessions_of(code: Any) -> KeptSessions:
    return KeptSessions(LocalEnvironments(code), idle_s=60.0)


def comparable(response: Response) -> Any:
    """Return what must be the same, however an episode was played: all but times and cache hits."""
    sampled, episode = response.sampled, response.episode
    turns = [replace(turn, started_s=0.0, ended_s=0.0) for turn in episode.turns]
    calls = [replace(call, wait_s=0.0) for call in episode.calls]
    labels = [None] * len(sampled.token_ids)
    for span in sampled.version_spans:
        labels[span.start : span.end] = [span.version] * (span.end - span.start)
    return sampled.token_ids, sampled.logprobs, labels, sampled.finish_reason, turns, calls, episode.reward


@pytest.fixture(autouse=True)
def _fresh():
    MADE.clear()


async def test_an_episode_by_hand():
    sessions = sessions_of(Sums)
    actor = Actor(sessions, TEXTS)
    response = await actor.plays()
    episode, tokens = response.episode, response.sampled.token_ids
    text = TOKENIZER.decode(list(episode.opening + tokens), skip_special_tokens=False)
    assert text.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nAdd the numbers of the list.<|im_end|>\n"
        f"<|im_start|>assistant\n{TEXTS[0]}\n<|im_start|>tool\ntotal 3<|im_end|>\n<|im_start|>assistant\n"
        f"{TEXTS[1]}\n<|im_start|>tool\ntotal 7<|im_end|>\n<|im_start|>assistant\n{TEXTS[2]}"
    )
    assert (episode.status, episode.reward, MADE, len(sessions)) == (EpisodeStatus.DONE, 7.0, [3, 4], 0)
    assert [(call.number, call.turn, call.tool, call.text) for call in episode.calls] == [
        (1, 0, "add", "total 3"),
        (2, 1, "add", "total 7"),
    ]
    learned = [tokens[turn.start : turn.end] for turn in episode.turns]
    assert [TOKENIZER.decode(list(each), skip_special_tokens=False) for each in learned] == TEXTS
    assert [response for *_, response in actor.asked] == [turn.start for turn in episode.turns]
    given = np.array(response.sampled.logprobs) == 0
    assert given.sum() == sum(end - start for start, end in episode.given(len(tokens)))
    (sample,) = Group.of(Prompt("p", (1, 2), "Hi"), [rollout_of(response)]).samples
    assert sample.tokens == len(episode.opening) + len(tokens)
    assert [tuple(part.token_ids) for part in sample.rollouts] == learned
    assert sample.scored.parts == {"environment": 7.0}


class Slow(Sums):
    async def add(self, number: int) -> str:
        """Add a number."""
        await asyncio.sleep(0.3)
        return await super().add(number)


async def test_an_episode_that_waits_leaves_its_actor_and_returns_with_the_answer():
    """Each of two calls takes 0.3 s, and an episode stays for 0.1 s. It is not generated or called again."""
    whole = await Actor(sessions_of(Sums), TEXTS).plays()
    sessions, prior, turns, left = sessions_of(Slow), None, 0, []
    MADE.clear()
    while True:
        actor = Actor(sessions, TEXTS, park_s=0.1)
        response = await actor.plays(prior)
        turns += len(actor.asked)
        if response.sampled.finish_reason != FinishReason.ABORT:
            break
        left.append((response.episode.status, len(response.episode.turns), len(response.episode.calls)))
        prior = rollout_of(response)
        await sessions.answered("p/1")
    assert left == [(EpisodeStatus.WAITING, 1, 0), (EpisodeStatus.WAITING, 2, 1)]
    assert comparable(response) == comparable(whole)
    assert (MADE, turns) == ([3, 4], 3)
    assert [call.wait_s for call in response.episode.calls] == pytest.approx([0.3, 0.3], abs=0.15)
    await sessions.answered("unknown")


@pytest.mark.parametrize(("code", "texts"), PLAYED)
async def test_an_episode_that_is_aborted_anywhere_continues_elsewhere_as_if_it_had_not_been(code, texts):
    whole = await Actor(sessions_of(code), texts).plays()
    made, stops = list(MADE), 0
    for budget in range(10**6):
        MADE.clear()
        sessions, prior, actors = sessions_of(code), None, 0
        while True:
            actors += 1
            actor = Actor(sessions, texts, budget=budget if actors < 3 else 10**6)
            response = await actor.plays(prior)
            if response.sampled.finish_reason != FinishReason.ABORT:
                break
            assert response.episode.status in (EpisodeStatus.RUNNING, EpisodeStatus.WAITING)
            prior = rollout_of(response)
        assert comparable(response) == comparable(whole), f"aborted after {budget}"
        assert made == MADE, f"aborted after {budget}"
        assert len(sessions) == 0
        stops += actors > 1
        if actors == 1:
            break
    assert stops > 10


async def test_a_lost_session_that_cannot_be_repeated_restarts_the_episode():
    whole = await Actor(sessions_of(Sums), TEXTS).plays()
    left = await Actor(sessions_of(Sums), TEXTS, budget=100).plays()
    MADE.clear()
    again = await Actor(sessions_of(Sums), TEXTS).plays(rollout_of(left))
    assert comparable(again) == comparable(whole)
    assert MADE == [3, 4]


async def test_a_loop_of_ones_own_whose_session_is_lost_is_run_again_with_the_turns_that_it_has_had():
    texts = ["one<|im_end|>", "four<|im_end|>"]
    whole = await Actor(sessions_of(looped), texts).plays()
    seen = set()
    for budget in range(2, 14):
        lost = sessions_of(looped)
        left = await Actor(lost, texts, budget=budget).plays()
        await lost.stop()
        had = sum(turn.finish_reason == "stop" for turn in left.episode.turns)
        again = Actor(sessions_of(looped), texts)
        assert comparable(await again.plays(rollout_of(left))) == comparable(whole)
        assert len(again.asked) == 2 - had
        seen.add(had)
    assert seen == {0, 1, 2}


async def test_a_killed_driver_repeats_an_episode_and_its_calls_are_not_made_again():
    sessions = sessions_of(Sums)
    await Actor(sessions, TEXTS, budget=70).plays()
    assert MADE == [3]
    again = await Actor(sessions, TEXTS).plays(attempt=2)
    assert (again.episode.reward, MADE) == (7.0, [3, 4])


@pytest.mark.parametrize(("code", "texts"), PLAYED)
async def test_a_finished_episode_that_is_lost_with_its_actor_is_repeated_without_its_calls(code, texts):
    sessions = sessions_of(code)
    whole = await Actor(sessions, texts).plays()
    made = list(MADE)
    again = await Actor(sessions, texts).plays()
    assert (comparable(again), MADE, len(sessions)) == (comparable(whole), made, 0)
    with pytest.raises(EnvironmentFailed, match="the session has ended"):
        await sessions.ask("p/1", 1, "call", 9, "add", {"number": 3})
    await Actor(sessions, texts).plays()
    assert made * 2 == MADE


async def test_other_arguments_for_a_call_that_was_made_fail_the_session():
    sessions = sessions_of(Sums)
    await sessions.ask("k", 1, "reset", 0, 1, {"what": "x"})
    assert (await sessions.ask("k", 1, "call", 1, "add", {"number": 2})).value.text == "total 2"
    given = await sessions.ask("k", 1, "call", 1, "add", {"number": 2})
    assert (given.value.text, given.resumed, MADE) == ("total 2", True, [2])
    with pytest.raises(EnvironmentFailed, match="was made before with other arguments"):
        await sessions.ask("k", 1, "call", 1, "add", {"number": 3})
    with pytest.raises(EnvironmentFailed, match="`call`: the session is gone"):
        await sessions.ask("k", 1, "call", 2, "add", {"number": 3})


async def test_a_caller_that_leaves_does_not_stop_its_call():
    gate = asyncio.Event()

    class Slow:
        def reset(self, seed: int, row: dict) -> str:
            return "Go."

        async def wait(self) -> str:
            """Wait."""
            MADE.append(1)
            await gate.wait()
            return "done"

    sessions = sessions_of(Slow)
    await sessions.ask("k", 1, "reset", 0, 1, {})
    caller = asyncio.create_task(sessions.ask("k", 1, "call", 1, "wait", {}))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    gate.set()
    assert (await sessions.ask("k", 1, "call", 1, "wait", {})).value.text == "done"
    assert MADE == [1]


async def test_an_environment_replica_that_is_lost_aborts_the_episode():
    async def lost(*_: Any) -> Any:
        raise SessionLeft

    item = SampleItem("p", 0, (1, 2), seed=5, row={"prompt": "Hi"})
    request = GenerateRequest((item,), Sampling(100, 1.0), "v", "actor", 1.0, 60.0, 60.0, environments=("e",))
    spec = EnvironmentSpec(type="sums:Sums")
    settings = EpisodeSettings(spec, ModelSpec(path="m"), "prompt", chat_template=True, chat_template_kwargs={})
    response = await EpisodeRollouter(settings, byte_format(), EnvironmentReplicas(lost)).finish(
        SampleTask(item, request, Call("run", 1, 1), None)
    )
    assert response.sampled.finish_reason is FinishReason.ABORT
    assert response.episode.status is EpisodeStatus.RUNNING


async def test_an_episode_is_shown_and_recorded_turn_by_turn():
    response = await Actor(sessions_of(Sums), TEXTS).plays()
    episode = Episode.of_json(json.loads(json.dumps(response.episode.as_json())))
    assert episode == response.episode
    assert [[call["answer"] for call in turn["calls"]] for turn in episode.shown()] == [["total 3"], ["total 7"], []]
    assert [(each["role"], each["content"]) for each in episode.transcript()] == [
        ("assistant", TEXTS[0].removesuffix("<|im_end|>")),
        ("tool", "total 3"),
        ("assistant", TEXTS[1].removesuffix("<|im_end|>")),
        ("tool", "total 7"),
        ("assistant", "The sum is 7."),
    ]


async def test_two_episodes_at_a_time_have_a_session_each():
    sessions = sessions_of(Sums)
    sampled, greedy = Actor(sessions, TEXTS), Actor(sessions, TEXTS, temperature=0.0)
    both = await asyncio.gather(sampled.plays(), greedy.plays())
    assert [each.episode.reward for each in both] == [7.0, 7.0]
    assert sorted(MADE) == [3, 3, 4, 4]
