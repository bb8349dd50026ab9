"""Environments in the test's own process, and models that say what a test wants."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless.environments.chat_format import TemplateFormat
from rlhfless.environments.contract import Description, checked
from rlhfless.environments.episode import play_episode
from rlhfless.environments.protocol import EnvironmentFailed, ModelAnswer, ModelAsked, ModelTurn, PlayResult
from rlhfless.environments.trajectory import EpisodeLimits, EpisodeTask, GeneratedTurn, Trajectory
from rlhfless.environments.worker import LocalSession
from rlhfless.functions.generation.episodes import response_of
from rlhfless.prepare.byte_tokenizer import byte_tokenizer
from rlhfless.records import FinishReason, Group, Prompt, Rollout, Sample

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


class OwnSession(LocalSession):
    """A session whose own loop, as in a process of its own, cannot catch the errors of its caller."""

    async def play(self, seed: int, row: Mapping[str, Any], turn: ModelTurn) -> PlayResult:
        failed: list[BaseException] = []

        async def asked(question: ModelAsked) -> ModelAnswer | None:
            try:
                return await turn(question)
            except BaseException as error:
                failed.append(error)
                raise

        try:
            return await super().play(seed, row, asked)
        except EnvironmentFailed:
            if failed:
                raise failed[0] from None
            raise


class LocalEnvironments:
    """Sessions of one class, without worker processes."""

    def __init__(self, code: Any) -> None:
        self.environment = checked("test:Environment", code)
        self.opened = 0
        self.idle = 1
        """As of EnvironmentWorkers."""

    @property
    def description(self) -> Description:
        return self.environment.description

    @asynccontextmanager
    async def session(self) -> AsyncIterator[OwnSession]:
        self.opened += 1
        session = OwnSession(self.environment)
        yield session
        await session.close()


@dataclass
class Says:
    """A model that says given texts in turn. A text without `<|im_end|>` was cut."""

    texts: Sequence[str]
    read: list[tuple[int, ...]] = field(default_factory=list)
    """The prompt of each turn."""
    seeds: list[int] = field(default_factory=list)
    tokenizer: Any = TOKENIZER

    async def generate(self, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> GeneratedTurn:
        text = self.texts[len(self.read) % len(self.texts)]
        self.read.append(tuple(token_ids))
        self.seeds.append(seed)
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))[:max_tokens]
        ended = ids and ids[-1] == self.tokenizer.eos_token_id
        return GeneratedTurn(ids, FinishReason.STOP if ended else FinishReason.LENGTH, (-0.5,) * len(ids))


def byte_format(tools: Sequence[Any] = ()) -> TemplateFormat:
    chat = TemplateFormat(TOKENIZER)
    chat.check(tools)
    return chat


async def played(
    code: Any,
    *texts: str,
    row: dict[str, Any] | None = None,
    seed: int = 1,
    messages: tuple[Any, ...] = (),
    **limits: Any,
) -> tuple[Trajectory, Says, LocalEnvironments]:
    """Play one episode of a class with a model that says these texts."""
    environments, model = LocalEnvironments(code), Says(texts)
    task = EpisodeTask("prompt", 0, row or {}, seed, messages=messages)
    described = environments.description
    chat = byte_format([*described.tools, *({},) * described.offers])
    episode = await play_episode(task, model, chat, environments, EpisodeLimits(**limits))
    return episode, model, environments


def text_of(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=False)


def sample_of(trajectory: Trajectory) -> Sample:
    """Return an episode as the learner gets it."""
    response = response_of(trajectory, "actor")
    sampled = response.sampled
    rollout = Rollout(
        *trajectory.key,
        seed=0,
        token_ids=np.asarray(sampled.token_ids, np.int64),
        logprobs=np.asarray(sampled.logprobs, np.float32),
        text=sampled.text,
        finish_reason=sampled.finish_reason,
        version_spans=sampled.version_spans,
        actor="actor",
        started_s=trajectory.started_s,
        finished_s=trajectory.ended_s,
        episode=response.episode,
    )
    (sample,) = Group.of(Prompt(trajectory.key[0], (1,), ""), [rollout]).samples
    return sample
