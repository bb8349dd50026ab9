"""Play one episode: turns of a model, answers of an environment, until one of them or a limit ends it.

The model and the environment are interfaces (rlhfless.environments.protocol), and the clock is the event loop's, so
that runs, `rlhfless environments test` and simulations share this code.

An environment that fails is restored or replayed if it can be; else the episode starts again. Failures never become
rewards. What the model does wrong is part of the episode, and is scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.chat.messages import DataFault, Message
from rlhfless.environments.chat_format import ChatFormat, ReadTurn
from rlhfless.environments.protocol import EnvironmentFailed, Model, ModelAnswer, ModelAsked, OpenSession
from rlhfless.environments.recovery import NotReplayable, RecoveredEnvironment
from rlhfless.environments.tool_messages import tool_message
from rlhfless.environments.trajectory import (
    Answer,
    AnswerOutcome,
    ContextSegment,
    EnvironmentCall,
    EpisodeLimits,
    EpisodeTask,
    ModelSegment,
    Origin,
    Parsed,
    Segment,
    Tokens,
    Trajectory,
)
from rlhfless.records import EpisodeStatus, FinishReason
from rlhfless.spec.errors import InputError
from rlhfless.util.clock import monotonic_s, unix_s


@dataclass(frozen=True, slots=True)
class Restarted:
    """The episode starts again: events before this one are void."""

    cause: str


Event = Segment | EnvironmentCall | tuple[int, str, Any] | Restarted
"""A segment, a call that was answered, or (number, tool, arguments) of one that is about to be sent."""

Journal = Callable[[Event], Awaitable[None]]
"""Writes an event. A call is sent, and a turn goes on, once it has returned."""


class _SessionLost(Exception):
    """The session of `past` is gone, and what it did cannot be repeated; the message is the cause."""


class _Ended(Exception):
    """The episode has ended."""

    def __init__(self, status: EpisodeStatus) -> None:
        super().__init__(status)
        self.status = status


async def play_episode(
    task: EpisodeTask,
    model: Model,
    chat: ChatFormat,
    environments: OpenSession,
    limits: EpisodeLimits,
    journal: Journal | None = None,
    past: Sequence[Event] = (),
) -> Trajectory:
    """Play an episode to its end. Raises only the model's and the journal's errors.

    `past`: events of another process that played the beginning. If the session is still open, or the environment is
    replayable, the calls are repeated, and the answers must be the same; the model generates only what is not there. A
    user's own loop is run again, with the turns of `past` while its messages are the same. Otherwise the episode starts
    again.
    """
    started_s, failures = unix_s(), list[str]()
    until_failure: tuple[tuple[int, str], ...] = ()
    deadline_s = asyncio.get_running_loop().time() + limits.episode_s
    past = _since_restart(past)
    while True:
        episode = _Episode(task, model, chat, environments, limits, _After(len(past), journal), failures, past)
        try:
            status, cause = await episode.play(deadline_s), ""
        except _SessionLost as lost:
            past = await _restart(journal, str(lost))
            continue
        except EnvironmentFailed as error:
            failures.append(str(error))
            until_failure = until_failure or episode.until_failure or episode.calls_until("")
            if len(failures) <= limits.retries:
                if environments.description.plays:  # it is run again, with the turns that it has had
                    past = max(past, episode.events, key=len)
                else:
                    past = await _restart(journal, str(error))
                continue
            status, cause = EpisodeStatus.FAILED, str(error)
        return Trajectory(
            key=(task.prompt_id, task.sample_index),
            segments=tuple(episode.segments),
            calls=tuple(episode.calls),
            status=status,
            reward=None if status is EpisodeStatus.FAILED else episode.reward,
            parts=episode.parts,
            environment=environments.description.name,
            digest=environments.description.digest,
            cause=cause,
            failures=tuple(failures),
            until_failure=until_failure or episode.until_failure,
            started_s=started_s,
            ended_s=unix_s(),
        )


def _since_restart(events: Sequence[Event]) -> Sequence[Event]:
    last = max((index for index, event in enumerate(events) if isinstance(event, Restarted)), default=-1)
    return events[last + 1 :]


async def _restart(journal: Journal | None, cause: str) -> Sequence[Event]:
    if journal:
        await journal(Restarted(cause))
    return ()


class _After:
    """A journal without its first events, which an earlier process has written."""

    def __init__(self, written: int, journal: Journal | None) -> None:
        self._left, self._journal = written, journal

    async def __call__(self, event: Event) -> None:
        self._left -= 1
        if self._left < 0 and self._journal:
            await self._journal(event)


class _Episode:
    """One attempt at an episode."""

    def __init__(
        self,
        task: EpisodeTask,
        model: Model,
        chat: ChatFormat,
        environments: OpenSession,
        limits: EpisodeLimits,
        journal: Journal,
        failures: list[str],
        past: Sequence[Event],
    ) -> None:
        self._task, self._model, self._chat, self._limits = task, model, chat, limits
        self._description = environments.description
        self._failures = failures
        self._environment = RecoveredEnvironment(environments, task, limits, failures)
        self._write = journal
        self._tools: Sequence[Any] = ()
        self._read: dict[int, list[int]] = {}
        """By conversation: what the model has read and written."""
        self._invalid_turns = 0
        self._has_past = bool(past)
        self._past_turns = [event for event in past if isinstance(event, ModelSegment)]
        self._past_calls = [event for event in past if isinstance(event, EnvironmentCall)]
        self._past_context = [event for event in past if isinstance(event, ContextSegment)]
        self.events: list[Event] = []
        self.segments: list[Segment] = []
        self.calls: list[EnvironmentCall] = []
        self.until_failure: tuple[tuple[int, str], ...] = ()
        """See Episode; of this attempt."""
        self.reward: float | None = None
        self.parts: Mapping[str, float] = {}

    async def play(self, deadline_s: float) -> EpisodeStatus:
        """Raises EnvironmentFailed."""
        async with self._environment:
            try:
                async with asyncio.timeout_at(deadline_s) as limit:
                    status = await (self._own_loop() if self._description.plays else self._turns())
            except TimeoutError:
                if not limit.expired():
                    raise
                status = EpisodeStatus.TIME
            if not self._description.plays and self._environment.is_open:
                self.reward = await self._environment.run(lambda session: session.reward())
            if self.reward is None:
                rewards = [turn.reward for turn in self._model_turns() if turn.reward is not None]
                self.reward = sum(rewards) if rewards else None
            return status

    async def _turns(self) -> EpisodeStatus:
        opening = await self._environment.open()
        self._require_session()
        self._tools = opening.tools
        await self._begin(self._task.messages, opening.messages, self._limits.result_tokens)
        while True:
            try:
                turn, segment = await self._generate()
                added = await self._answered(turn)
            except _Ended as end:
                return end.status
            if added is None:
                return EpisodeStatus.DONE
            if self._invalid_turns >= self._limits.invalid_calls:
                return EpisodeStatus.INVALID_CALLS
            if len(self._model_turns()) >= self._limits.turns:
                return EpisodeStatus.TURNS
            origin = Origin.TOOL if added[0].role == "tool" else Origin.OBSERVATION
            await self._give(origin, turn, segment, added)

    async def _own_loop(self) -> EpisodeStatus:
        """Run the user's `play`; its messages are the given segments."""
        ended: list[EpisodeStatus] = []
        last: dict[int, tuple[ReadTurn, ModelSegment]] = {}
        since_s = monotonic_s()

        async def turn(asked: ModelAsked) -> ModelAnswer | None:
            nonlocal since_s
            try:
                if len(self._model_turns()) >= self._limits.turns:
                    raise _Ended(EpisodeStatus.TURNS)
                of = asked.conversation
                self._tools = asked.tools
                if asked.token_ids is not None:
                    await self._take_tokens(asked.token_ids, of, last.get(of), monotonic_s() - since_s)
                elif of in last:
                    await self._note(*last[of], asked.messages, monotonic_s() - since_s)
                    is_results = all(message.role == "tool" for message in asked.messages)
                    await self._give(Origin.TOOL if is_results else Origin.USER, *last[of], asked.messages)
                else:
                    self._chat.check(self._tools)
                    await self._begin((), asked.messages, self._limits.context_tokens, of)
                context_tokens = len(self._read[of])
                last[of] = await self._generate(asked.max_tokens, of)
            except _Ended as end:
                ended[:] = [end.status]
                return None
            except DataFault as error:
                raise EnvironmentFailed(
                    f"the chat template does not take its messages: {error}; {error.hint}"
                ) from error
            except InputError as error:
                raise EnvironmentFailed(str(error)) from error
            since_s = monotonic_s()
            read, segment = last[of]
            is_cut = segment.generated.finish_reason is FinishReason.LENGTH
            answer = ModelAnswer(read.message, is_cut, context_tokens, len(segment.token_ids))
            if asked.token_ids is None:
                return answer
            return replace(answer, token_ids=segment.token_ids, logprobs=segment.generated.logprobs)

        result = await self._environment.play(turn)
        self.reward, self.parts = result.reward, result.parts
        return ended[0] if ended else EpisodeStatus.DONE

    async def _take_tokens(
        self, token_ids: Tokens, of: int, last: tuple[ReadTurn, ModelSegment] | None, wait_s: float
    ) -> None:
        """Add tokens of a client that renders conversations itself. `last`: the turn before them."""
        if (most := max(token_ids, default=0)) >= self._chat.vocabulary:
            raise EnvironmentFailed(f"it sent the token id {most}, and the model has {self._chat.vocabulary}")
        if last is not None:
            text = self._chat.read(token_ids, FinishReason.STOP, ()).text
            await self._note(*last, [Message("user", (text,))], wait_s)
        self._require_room(token_ids, of)
        await self._add(ContextSegment(Origin.USER if last else Origin.PROMPT, token_ids, conversation=of))

    def _require_room(self, token_ids: Tokens, of: int) -> None:
        """Raises _Ended if tokens that begin a further conversation leave no room for a turn."""
        if of and sum(map(len, self._read.values())) + len(token_ids) >= self._limits.context_tokens:
            raise _Ended(EpisodeStatus.TOKENS)

    async def _note(self, turn: ReadTurn, of: ModelSegment, added: Sequence[Message], wait_s: float) -> None:
        """Record the messages of the user's own loop after a turn: results of its calls, and others as observations."""
        calls = iter(turn.message.calls)
        for message in added:
            call = next(calls, None) if message.role == "tool" else None
            tool, arguments = (call.name, call.arguments) if call else ("", turn.message.text)
            number = len(self.calls) + 1
            await self._journal((number, tool, arguments))
            answer = Answer(message.text)
            self.calls.append(
                EnvironmentCall(number, of.turn, tool, arguments, answer, wait_s, call.call_id if call else None)
            )
            await self._journal(self.calls[-1])
            wait_s = 0.0

    def calls_until(self, tool: str) -> tuple[tuple[int, str], ...]:
        """Return turn and tool of all calls, with one of `tool` in the current turn; none before the first turn."""
        turn = len(self._model_turns()) - 1
        return () if turn < 0 else (*((call.turn, call.tool) for call in self.calls), (turn, tool))

    def _require_session(self) -> None:
        """Raise _SessionLost if the past cannot be repeated."""
        if self._has_past and not (self._description.replayable or self._environment.resumed):
            raise _SessionLost("its session is gone, and its environment is not replayable")

    async def _begin(self, prompt: Sequence[Message], added: Sequence[Message], most: int, of: int = 0) -> None:
        given = self._chat.opening(prompt, added, self._tools, most)
        self._require_room(given.token_ids, of)
        await self._add(ContextSegment(Origin.PROMPT, given.token_ids, given.bodies, of))

    async def _generate(self, max_tokens: int | None = None, of: int = 0) -> tuple[ReadTurn, ModelSegment]:
        """Return the model's next turn in a conversation. Raises _Ended if there is no room for it."""
        number = len(self._model_turns())
        most = self._limits.turn_tokens if max_tokens is None else min(self._limits.turn_tokens, max_tokens)
        room = min(most, self._limits.context_tokens - sum(map(len, self._read.values())))
        if room < 1:
            raise _Ended(EpisodeStatus.TOKENS)
        if number < len(self._past_turns):
            segment = replace(self._past_turns[number], reward=None, conversation=of)
            await self._add(segment)
            return self._chat.read(segment.token_ids, segment.generated.finish_reason, self._tools), segment
        seed, started_s = self._task.turn_seed(number), unix_s()
        generated = await self._model.generate(tuple(self._read[of]), seed=seed, max_tokens=room)
        turn = self._chat.read(generated.token_ids, generated.finish_reason, self._tools)
        segment = ModelSegment(number, seed, generated, turn.text, turn.parsed, started_s, unix_s(), conversation=of)
        await self._add(segment)
        return turn, segment

    async def _answered(self, turn: ReadTurn) -> list[Message] | None:
        """Return the environment's answers to a turn as messages; None if the episode is done."""
        if turn.parsed in (Parsed.INVALID, Parsed.UNFINISHED) and turn.fault:
            self._invalid_turns += 1
            return [Message("user", (f"Error: {turn.fault}.",))]
        if not turn.message.calls and not self._description.observes:
            return None
        answers: list[Answer] = []
        for call in turn.message.calls:
            answers.append(await self._call(call.name, call.arguments, call.call_id))
            if answers[-1].done:
                break
        if not turn.message.calls:
            answers.append(await self._call("", turn.message.text, None))
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        last = self.segments[-1]
        if rewards and isinstance(last, ModelSegment):
            self.segments[-1] = replace(last, reward=sum(rewards))
        is_invalid = any(answer.outcome is AnswerOutcome.INVALID for answer in answers)
        self._invalid_turns = self._invalid_turns + 1 if is_invalid else 0
        if answers[-1].done:
            return None
        if not turn.message.calls:
            return [Message("user", (answers[0].text or "",))]
        pairs = zip(turn.message.calls, answers, strict=True)
        return [tool_message(call, index, answer.text or "") for index, (call, answer) in enumerate(pairs)]

    async def _call(self, tool: str, arguments: Any, call_id: str | None) -> Answer:
        number, started_s = len(self.calls) + 1, monotonic_s()
        await self._journal((number, tool, arguments))
        failures = len(self._failures)
        try:
            answer = await self._environment.answer(number, tool, arguments)
        except EnvironmentFailed:
            self.until_failure = self.until_failure or self.calls_until(tool)
            raise
        if len(self._failures) > failures:  # it was answered in a new session
            self.until_failure = self.until_failure or self.calls_until(tool)
        if number <= len(self._past_calls) and answer.digest != self._past_calls[number - 1].answer.digest:
            raise NotReplayable(number, tool)
        turn = len(self._model_turns()) - 1
        waited_s = max(monotonic_s() - started_s, answer.took_s)
        call = EnvironmentCall(number, turn, tool, arguments, replace(answer, took_s=0.0), waited_s, call_id)
        self.calls.append(call)
        await self._journal(call)
        return answer

    async def _give(self, origin: Origin, turn: ReadTurn, segment: ModelSegment, added: Sequence[Message]) -> None:
        given = self._chat.following(turn, segment.token_ids, added, self._limits.result_tokens)
        if any(given.cut_tokens) and (self._description.plays or not turn.fault):
            first = len(self.calls) - len(given.cut_tokens)
            for index, cut in enumerate(given.cut_tokens):
                self.calls[first + index] = replace(self.calls[first + index], cut_tokens=cut)
        await self._add(ContextSegment(origin, given.token_ids, given.bodies, segment.conversation))

    async def _add(self, segment: Segment) -> None:
        """Raises NotReplayable or _SessionLost for a context that is not that of `past`."""
        if isinstance(segment, ContextSegment):
            number = sum(isinstance(each, ContextSegment) for each in self.segments)
            if number < len(self._past_context) and segment.token_ids != self._past_context[number].token_ids:
                if self._description.plays:
                    raise _SessionLost("its loop was run again, and gave other messages")
                raise NotReplayable(0, "")
        self.segments.append(segment)
        self._read.setdefault(segment.conversation, []).extend(segment.token_ids)
        await self._journal(segment)

    async def _journal(self, event: Event) -> None:
        self.events.append(event)
        await self._write(event)

    def _model_turns(self) -> list[ModelSegment]:
        return [segment for segment in self.segments if isinstance(segment, ModelSegment)]
