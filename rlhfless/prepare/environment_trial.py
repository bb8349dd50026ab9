"""Play episodes of an environment without GPUs, and find its faults (`rlhfless environments test`)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfless.chat.messages import DataFault, conversation
from rlhfless.environments.chat_format import Format, TemplateFormat, chat_format
from rlhfless.environments.contract import Description, EnvironmentSource
from rlhfless.environments.episode import play_episode
from rlhfless.environments.protocol import EnvironmentFailed, EnvironmentSession, Model
from rlhfless.environments.trajectory import (
    AnswerOutcome,
    EnvironmentCall,
    EpisodeLimits,
    EpisodeTask,
    ModelSegment,
    Parsed,
    Trajectory,
)
from rlhfless.environments.workers import EnvironmentWorkers
from rlhfless.prepare.byte_tokenizer import byte_tokenizer
from rlhfless.prepare.data_rows import Row, read_rows
from rlhfless.prepare.model import load_policy
from rlhfless.prepare.trial_policies import LocalModel, RandomPolicy, ScriptedPolicy, read_script
from rlhfless.records import EpisodeStatus, sample_seed
from rlhfless.spec import ModelSpec, SizesSpec
from rlhfless.spec.errors import InputError, Problem

CHECKED = 3
"""Episodes whose reset, calls and snapshots are repeated."""

MOST_FAILED = 3
"""Failed episodes after which the trial stops."""


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What to play, and how."""

    source: EnvironmentSource
    rows: Path | None = None
    episodes: int = 10
    policy: str = "random"
    """`random`, `scripted:FILE` or `model`."""
    model: str = ""
    """Folder or hub name, for its chat template and tokenizer."""
    seed: int = 0
    memory_mib: int = 1024
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)


@dataclass(slots=True)
class EnvironmentTrial:
    """What a trial found."""

    description: Description
    tools: tuple[Mapping[str, Any], ...]
    episodes: list[Trajectory] = field(default_factory=list)
    transcripts: list[list[tuple[str, str]]] = field(default_factory=list)
    """Per episode: who speaks, and the text."""
    faults: Counter[str] = field(default_factory=Counter)
    """Each fault, and in how many episodes."""
    notes: list[str] = field(default_factory=list)
    wall_s: float = 0.0


def try_environment(settings: TrialSettings) -> EnvironmentTrial:
    """Play episodes. Raises InputError if the environment, the rows or the policy cannot be used."""
    rows = [Row("no row", {})]
    if settings.rows is not None:
        rows = read_rows("--rows", str(settings.rows.absolute()), "train", SizesSpec())
    return asyncio.run(_Trial(settings, rows).run())


class _Trial:
    def __init__(self, settings: TrialSettings, rows: Sequence[Row]) -> None:
        self._settings, self._rows = settings, rows
        self._tokenizer, self._chat = _chat_of(settings.model)
        self._scripts: list[list[Any]] = []
        kind, _, file = settings.policy.partition(":")
        if kind == "scripted" and file:
            self._scripts = read_script(Path(file))
        elif settings.policy not in ("random", "model") or (settings.policy == "model" and not settings.model):
            hint = "write random, scripted:FILE, or model with --model"
            raise InputError("the policy cannot be used", [Problem("--policy", f"got {settings.policy!r}", hint)])
        limits = settings.limits
        self._workers = EnvironmentWorkers(settings.source, 2, call_s=limits.call_s, memory_mib=settings.memory_mib)

    async def run(self) -> EnvironmentTrial:
        started_s = time.perf_counter()
        try:
            await self._workers.start()
            self._found = EnvironmentTrial(self._workers.description, self._workers.description.tools)
            if not self._found.description.plays:
                await self._compare_resets()
            self._chat.check(self._found.tools)
            await self._play()
        finally:
            self._workers.close()
        self._found.wall_s = time.perf_counter() - started_s
        self._found.notes += _notes(self._found)
        return self._found

    async def _play(self) -> None:
        model = LocalModel(self._settings.model, self._chat.ends) if self._settings.policy == "model" else None
        for number in range(self._settings.episodes):
            task = self._task(number)
            policy = model or self._policy(number)
            try:
                episode = await play_episode(task, policy, self._chat, self._workers, self._settings.limits)
            except DataFault as error:  # the template does not take these messages
                raise InputError(
                    "the rows cannot be used", [Problem(task.prompt_id, str(error), error.hint)]
                ) from error
            self._found.episodes.append(episode)
            self._found.transcripts.append(transcript(episode, self._tokenizer))
            self._found.faults.update(set(episode.failures))
            failed = sum(each.status is EpisodeStatus.FAILED for each in self._found.episodes)
            if failed >= MOST_FAILED:
                self._found.notes.append(f"stopped after {failed} failed episodes")
                return
            if number < CHECKED and episode.status is not EpisodeStatus.FAILED and not self._found.description.plays:
                await self._compare_calls(task, episode)

    def _task(self, number: int) -> EpisodeTask:
        row = self._rows[number % len(self._rows)]
        prompt = row.values.get("prompt")
        try:
            messages = tuple(conversation(prompt, "prompt", row.values)) if prompt else ()
        except DataFault as error:
            raise InputError("the rows cannot be used", [Problem(row.where, str(error), error.hint)]) from error
        seed = sample_seed(self._settings.seed, 0, row.where, number)
        return EpisodeTask(row.where, number, row.values, seed, messages=messages)

    def _policy(self, number: int) -> Model:
        if self._scripts:
            return ScriptedPolicy(self._tokenizer, self._chat, self._scripts[number % len(self._scripts)])
        return RandomPolicy(self._tokenizer, self._chat, self._found.tools)

    def _fault(self, what: str) -> None:
        self._found.faults[what] += 1

    # -- what is repeated

    async def _compare_resets(self) -> None:
        """Reset with the same seed in two processes."""
        task = self._task(0)
        try:
            async with self._workers.session() as one, self._workers.session() as other:
                openings = [await each.reset(task.environment_seed, task.row) for each in (one, other)]
        except EnvironmentFailed:
            return  # the episodes will say so
        self._found.tools = openings[0].tools
        if openings[0] != openings[1]:
            texts = [" ".join(message.text for message in opening.messages)[:80] for opening in openings]
            what = f"with the same seed it first said {texts[0]!r} and then {texts[1]!r}"
            self._fault(f"`reset` is not deterministic: {what}; draw from random.Random(seed) alone")

    async def _compare_calls(self, task: EpisodeTask, episode: Trajectory) -> None:
        """Repeat an episode's calls in another process, in one go and from a snapshot."""
        description = self._found.description
        middle = len(episode.calls) // 2
        try:
            async with self._workers.session() as repeated:
                await repeated.reset(task.environment_seed, task.row)
                first = await _difference(repeated, episode.calls[:middle])
                state = await repeated.snapshot() if description.snapshots else None
                first = first or await _difference(repeated, episode.calls[middle:])
                reward = await repeated.reward()
            differs_in_reward = reward is not None and reward != episode.reward  # None: calls have the rewards
            if description.replayable and (first or differs_in_reward):
                what = first or f"the reward was {episode.reward:g} and then {reward}"
                self._fault(f"it says `replayable = True`, but a repeated episode differs: {what}")
            if state is None or first:
                return
            async with self._workers.session() as restored:
                await restored.restore(state)
                differs = await _difference(restored, episode.calls[middle:])
                restored_reward = await restored.reward()
            if differs or reward != restored_reward:
                what = differs or f"the reward was {reward} and then {restored_reward}"
                self._fault(f"`restore` does not bring back what `snapshot` saved: {what}")
        except EnvironmentFailed as error:
            self._fault(str(error))


async def _difference(session: EnvironmentSession, calls: Sequence[EnvironmentCall]) -> str:
    """Repeat calls; say which answer differs first, or return an empty text."""
    for call in calls:
        answer = await session.call(call.number, call.tool, call.arguments)
        if answer.digest != call.answer.digest:
            texts = [(each.text or "")[:80] for each in (call.answer, answer)]
            return f"call {call.number} (`{call.tool or 'observe'}`) first gave {texts[0]!r} and then {texts[1]!r}"
    return ""


def _chat_of(path: str) -> tuple[Any, Format]:
    """Return a model's tokenizer and its chat format; without a model, one token per byte."""
    if not path:
        tokenizer = byte_tokenizer()
        return tokenizer, TemplateFormat(tokenizer)
    policy = load_policy(ModelSpec(path=str(Path(path).absolute()) if Path(path).is_dir() else path))
    tokenizer = policy.tokenizer
    return tokenizer, chat_format(tokenizer, policy.end_token_ids, template=bool(tokenizer.chat_template))


def _notes(trial: EnvironmentTrial) -> list[str]:
    """Return what is no fault but rarely meant."""
    notes, played = [], [each for each in trial.episodes if each.status is not EpisodeStatus.FAILED]
    calls = [call for episode in played for call in episode.calls]
    if played and trial.tools and not any(call.answer.outcome is AnswerOutcome.RESULT for call in calls):
        notes.append("no episode had a tool call that worked")
    if played and trial.description.ends and not any(episode.status is EpisodeStatus.DONE for episode in played):
        notes.append("no episode was done before a limit")
    rewards = {episode.reward for episode in played}
    if len(played) > 1 and len(rewards) == 1:
        notes.append(f"all rewards are {rewards.pop()}: a policy cannot learn from equal rewards")
    return notes


def transcript(episode: Trajectory, tokenizer: Any) -> list[tuple[str, str]]:
    """Return who speaks and the text, segment by segment: exactly the tokens that the model reads, and the answer after
    the last turn, which it does not read."""
    spoken = []
    for segment in episode.segments:
        who = f"model, turn {segment.turn + 1}" if isinstance(segment, ModelSegment) else str(segment.origin)
        who += f", conversation {segment.conversation + 1}" if segment.conversation else ""
        spoken.append((who, tokenizer.decode(list(segment.token_ids), skip_special_tokens=False)))
    ended_by_answer = bool(episode.calls) and episode.segments[-1:] == episode.turns[-1:]
    if ended_by_answer and episode.turns[-1].parsed is Parsed.CALLS and episode.calls[-1].answer.text:
        spoken.append(("last answer, which ends the episode", episode.calls[-1].answer.text))
    return spoken
