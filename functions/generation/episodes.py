"""Episodes on a generation actor: turns of the engine, and answers of an environment on a replica of its own.

An episode leaves the actor as a response of one turn does: aborted, with its tokens so far. Its session stays open, and
the next actor repeats its calls, which the session answers without making them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from rlhfless.chat.end_tokens import end_token_ids
from rlhfless.chat.messages import Message, conversation
from rlhfless.environments.chat_format import Format, chat_format
from rlhfless.environments.contract import Description
from rlhfless.environments.episode import Event, Restarted, play_episode
from rlhfless.environments.trajectory import (
    Answer,
    AnswerOutcome,
    ContextSegment,
    EnvironmentCall,
    EpisodeLimits,
    EpisodeTask,
    GeneratedTurn,
    ModelSegment,
    Origin,
    Parsed,
    Trajectory,
)
from rlhfless.functions.environment.remote import (
    EnvironmentReplicas,
    RemoteEnvironment,
    SessionLeft,
    SessionParked,
)
from rlhfless.functions.generation.engine import Sampled
from rlhfless.functions.generation.messages import SampleItem, replica_of
from rlhfless.functions.generation.rollouter import PriorTurn, Response, SampleTask, continued
from rlhfless.records import EpisodeStatus, EpisodeTurn, FinishReason, Rollout, RouteSpan, VersionSpan, routes_within
from rlhfless.spec import EnvironmentSpec, ModelSpec, RunSpec
from rlhfless.util.clock import unix_s

log = logging.getLogger(__name__)

T = TypeVar("T")

UNFINISHED = (EpisodeStatus.RUNNING, EpisodeStatus.WAITING)


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What all episodes of a run have in common."""

    spec: EnvironmentSpec
    model: ModelSpec
    prompt_field: str
    chat_template: bool
    chat_template_kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, spec: RunSpec) -> EpisodeSettings | None:
        """Return the settings of a run; None without an environment."""
        if spec.environment is None:
            return None
        data = spec.data
        return cls(spec.environment, spec.model, data.prompt_field, data.chat_template, data.chat_template_kwargs)

    def chat_format(self) -> Format:
        """Return the format of the run's conversations, with the model's tokenizer."""
        from transformers import AutoTokenizer  # takes seconds to import

        model = self.model
        return chat_format(
            AutoTokenizer.from_pretrained(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code),
            end_token_ids(model.path),
            template=self.chat_template,
            kwargs=self.chat_template_kwargs,
        )


class EpisodeRollouter:
    """Plays the episodes of a run; a Rollouter."""

    def __init__(self, settings: EpisodeSettings, chat: Format, replicas: EnvironmentReplicas | None = None) -> None:
        self._settings, self._chat = settings, chat
        self._replicas = EnvironmentReplicas() if replicas is None else replicas
        self._description: Description | None = None

    async def finish(self, task: SampleTask) -> Response:
        """See Rollouter. An aborted episode returns what it has."""
        item, request = task.item, task.request
        self._replicas.trust(replica_of(request.environments, item.session))
        episode = EpisodeTask(item.prompt_id, item.sample_index, item.row, item.seed, messages=self._messages(item))
        past, prior = past_of(item.prior)
        played: list[Event] = list(past)
        model = _Model(task, played, prior)

        async def keep(event: Event) -> None:
            if isinstance(event, Restarted):
                played.clear()
                model.restart()
            else:
                played.append(event)

        context_tokens = len(item.prompt_token_ids) + request.sampling.max_tokens
        limits = EpisodeLimits.of(self._settings.spec, context_tokens)
        try:
            environment = await self._environment(task)
            trajectory = await play_episode(episode, model, self._chat, environment, limits, keep, past)
        except SessionLeft as left:
            segments = [event for event in played if isinstance(event, ContextSegment | ModelSegment)]
            segments += left.partial if isinstance(left, _TurnAborted) else []
            calls = tuple(event for event in played if isinstance(event, EnvironmentCall))
            status = EpisodeStatus.WAITING if left.waits else EpisodeStatus.RUNNING
            trajectory = Trajectory(item.key, tuple(segments), calls, status, None)
        return response_of(trajectory, task.request.actor)

    def _messages(self, item: SampleItem) -> tuple[Message, ...]:
        """Return the row's prompt as messages."""
        prompt = item.row.get(self._settings.prompt_field)
        return tuple(conversation(prompt, self._settings.prompt_field, item.row)) if prompt else ()

    async def _environment(self, task: SampleTask) -> RemoteEnvironment:
        """Return the episode's session. Raises SessionLeft."""
        replica = replica_of(task.request.environments, task.item.session)
        park_s = self._settings.spec.park_s

        async def ask(method: str, *arguments: Any) -> Any:
            # A finished episode does not leave its actor: it ends its session first.
            left = asyncio.Event() if method == "end" else task.aborted
            asked = self._replicas.ask(left, replica, task.call, method, *arguments)
            try:
                return await (asyncio.wait_for(asked, park_s) if method == "ask" else asked)
            except TimeoutError:
                raise SessionParked from None
            except SessionLeft:
                if method == "ask" and task.aborted.is_set():
                    raise SessionParked from None
                raise

        if self._description is None:
            description: Description = await ask("about")
            self._chat.check([*description.tools, *({},) * description.offers])
            self._description = description
        return RemoteEnvironment(self._description, task.item.session, ask)


class _TurnAborted(SessionLeft):
    """The engine aborted a turn."""

    def __init__(self, partial: Sequence[ModelSegment]) -> None:
        super().__init__()
        self.partial = tuple(partial)


class _Model:
    """The engine as an episode's model."""

    def __init__(self, task: SampleTask, played: Sequence[Event], prior: PriorTurn) -> None:
        """`played`: the events so far, to which others are added. `prior`: what an earlier actor generated of the next
        turn."""
        self._task, self._played, self._prior = task, played, prior

    def restart(self) -> None:
        """Forget what an earlier actor generated."""
        self._prior = PriorTurn()

    async def generate(self, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> GeneratedTurn:
        """See Model. Raises _TurnAborted."""
        context, prior = tuple(token_ids), self._prior
        self._prior = PriorTurn()
        before = [event for event in self._played if isinstance(event, ContextSegment | ModelSegment)]
        sampled = await continued(
            self._task.generate, context, prior, seed=seed, max_tokens=max_tokens,
            response=sum(len(segment.token_ids) for segment in before[1:]),
        )  # fmt: skip
        generated = GeneratedTurn(
            sampled.token_ids,
            sampled.finish_reason,
            sampled.logprobs,
            sampled.version_spans,
            self._task.request.actor,
            cached_tokens=sampled.cached_tokens,
            routes=sampled.routes,
        )
        if sampled.finish_reason is FinishReason.ABORT:
            now_s = unix_s()
            turn = sum(isinstance(segment, ModelSegment) for segment in before)
            partial = ModelSegment(turn, seed, generated, sampled.text, Parsed.UNFINISHED, now_s, now_s)
            raise _TurnAborted([partial] if sampled.token_ids else [])
        return generated


def past_of(prior: Rollout | None) -> tuple[list[Event], PriorTurn]:
    """Return the events of an aborted episode, and what was generated of its unfinished turn."""
    if prior is None or prior.episode is None or not prior.episode.opening:
        return [], PriorTurn()
    episode, at = prior.episode, 0
    events: list[Event] = [ContextSegment(Origin.PROMPT, episode.opening)]
    for number, turn in enumerate(episode.turns):
        if turn.start > at:
            events.append(ContextSegment(Origin.TOOL, _ids(prior, at, turn.start), conversation=turn.conversation))
        at = turn.end
        if turn.finish_reason == FinishReason.ABORT:
            part = prior.part(turn.start, turn.end)
            tokens = _ids(prior, turn.start, turn.end)
            return events, PriorTurn(tokens, part.logprobs, part.version_spans, turn.text, part.routes)
        events.append(_segment_of(prior, number, turn))
        for call in episode.calls:
            if call.turn == number:
                answer = Answer(call.text, AnswerOutcome(call.outcome), call.reward, call.done)
                events.append((call.number, call.tool, call.arguments))
                events.append(
                    EnvironmentCall(
                        call.number, number, call.tool, call.arguments, answer, call.wait_s, call.call_id,
                        call.cut_tokens,
                    )
                )  # fmt: skip
    if len(prior.token_ids) > at:
        events.append(ContextSegment(Origin.TOOL, _ids(prior, at, len(prior.token_ids))))
    return events, PriorTurn()


def _segment_of(prior: Rollout, number: int, turn: EpisodeTurn) -> ModelSegment:
    part = prior.part(turn.start, turn.end)
    generated = GeneratedTurn(
        _ids(prior, turn.start, turn.end),
        FinishReason(turn.finish_reason),
        tuple(part.logprobs.tolist()),
        part.version_spans,
        prior.actor,
        cached_tokens=turn.cached_tokens,
        routes=part.routes,
    )
    return ModelSegment(
        number, turn.seed, generated, turn.text, Parsed(turn.parsed), turn.started_s, turn.ended_s,
        conversation=turn.conversation,
    )  # fmt: skip


def _ids(rollout: Rollout, start: int, end: int) -> tuple[int, ...]:
    return tuple(map(int, rollout.token_ids[start:end]))


def response_of(trajectory: Trajectory, actor: str) -> Response:
    """Return an episode as a response: the tokens after its opening, with those of the environment."""
    segments = list(trajectory.segments[1:])
    if trajectory.status not in UNFINISHED:
        while segments and isinstance(segments[-1], ContextSegment):
            segments.pop()  # the model has not read it
    starts = list(accumulate((len(segment.token_ids) for segment in segments), initial=0))
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    routes: list[RouteSpan] = []
    for start, segment in zip(starts, segments, strict=False):
        if isinstance(segment, ModelSegment):
            logprobs += segment.generated.logprobs
            spans += (VersionSpan(s.version, s.start + start, s.end + start) for s in segment.generated.version_spans)
            routes += routes_within(segment.generated.routes, 0, len(segment.token_ids), start)
        else:
            logprobs += [0.0] * len(segment.token_ids)
    turns = trajectory.turns
    sampled = Sampled(
        request_id=actor,
        token_ids=tuple(token for segment in segments for token in segment.token_ids),
        logprobs=tuple(logprobs),
        finish_reason=_finish_reason(trajectory),
        version_spans=tuple(spans),
        cached_tokens=turns[0].generated.cached_tokens if turns else 0,
        text="".join(turn.text for turn in turns),
        routes=tuple(routes),
    )
    return Response(sampled, trajectory.episode())


def _finish_reason(trajectory: Trajectory) -> FinishReason:
    """Return LENGTH for an episode that was cut off by a limit of tokens or seconds."""
    if trajectory.status in UNFINISHED:
        return FinishReason.ABORT
    if trajectory.status in (EpisodeStatus.TOKENS, EpisodeStatus.TIME):
        return FinishReason.LENGTH
    turns = trajectory.turns
    return turns[-1].generated.finish_reason if turns else FinishReason.STOP
