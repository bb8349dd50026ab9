"""A teacher that a vLLM server computes: logprobs of token ids by `prompt_logprobs`, over HTTP.

A server that does not answer correctly within `timeout_s` stops the run, which can be resumed: a token without a
teacher's logprob must not be learned from as if it had one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import CallResult, DeviceBinding, Function, FunctionSettings, admitted
from rlhfless.functions.calls import Call, CallUsage, ReplicaInfo
from rlhfless.functions.launching import Launch, binding
from rlhfless.records import FloatArray
from rlhfless.rewards.endpoint import Endpoint
from rlhfless.rewards.protocol import Failed
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import ModelSpec, TeacherSpec
from rlhfless.util.errors import UserError
from rlhfless.util.tasks import gather_or_cancel

CHECKED_TOGETHER = 1000
"""Tokens of the vocabulary that are compared in one request."""

T = TypeVar("T")


class TeacherFailed(UserError):
    """A teacher's server is unusable. The message names the teacher, its address, the cause and a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTeacherSettings(FunctionSettings):
    """Settings of the client of a teacher's server."""

    teacher: TeacherSpec
    model: ModelSpec
    """The policy's, whose tokens the server must have."""
    hosts: Collection[str] | None
    """See ScoringSpec.http_hosts."""
    longest: int
    """Tokens of the longest sequence."""
    binding: DeviceBinding


class RemoteTeacher(Function):
    """The client of a teacher's server, on a CPU core."""

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> RemoteTeacherSettings:
        """Return a replica's settings for an allocation with bound devices."""
        return RemoteTeacherSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            teacher=kind.settings,
            model=launch.spec.model,
            hosts=launch.spec.scoring.http_hosts,
            longest=launch.max_model_len,
            binding=binding(allocation.devices, exclusive=False),
        )

    def __init__(self, settings: RemoteTeacherSettings) -> None:
        super().__init__(settings)
        settings.binding.bind()
        self._settings = settings
        self._server: TeacherServer | None = None

    @admitted
    async def describe(self, _: Call) -> CallResult[ReplicaInfo]:
        """Describe this replica. The first call compares the server's vocabulary with the policy's.

        Raises TeacherFailed.
        """
        if self._server is None:
            tokenizer = await asyncio.to_thread(_tokenizer_of, self._settings.model)
            server = TeacherServer(self._settings.teacher, self._settings.hosts)
            await server.check(tokenizer, self._settings.longest)
            self._server = server
        return CallResult(self.info())

    @admitted
    async def compute(self, _: Call, batch: PackedBatch) -> CallResult[FloatArray]:
        """Return the logprobs `[tokens]`, 0 on tokens that were not generated. Raises TeacherFailed."""
        assert self._server is not None, "a replica is described before it works"
        values = await self._server.logprobs(batch)
        return CallResult(values, CallUsage(input_tokens=len(batch.tokens), sequences=batch.sequences))


class TeacherServer:
    """Requests to a teacher's vLLM server."""

    def __init__(self, teacher: TeacherSpec, hosts: Collection[str] | None = None) -> None:
        assert teacher.url is not None, "only teachers with a url have a server"
        self._teacher, self._url = teacher, teacher.url
        self._endpoint = Endpoint(teacher, teacher.url, hosts, retries=None)
        self._model = ""

    async def check(self, tokenizer: Any, longest: int) -> None:
        """Check that the server has the policy's vocabulary, and room for `longest` tokens. Raises TeacherFailed."""
        if problems := await asyncio.to_thread(self._endpoint.problems):  # it resolves a name
            raise self._failed("; ".join(problems), "give what is missing, and resume the run")
        async with self._endpoint.client() as client:
            answer = await self._ask(client, "GET", "/v1/models", None, _first_model)
            self._model = answer["id"]
            room = answer.get("max_model_len")
            if isinstance(room, int) and room < longest + 1:
                what = f"{self._model!r} reads up to {room - 1} tokens, and prompt and response may have {longest}"
                raise self._failed(what, f"start the server with --max-model-len {longest + 1}")
            vocabulary = sorted(tokenizer.get_vocab().values())
            chunks = [
                vocabulary[start : start + CHECKED_TOGETHER] for start in range(0, len(vocabulary), CHECKED_TOGETHER)
            ]
            same = await gather_or_cancel(*(self._same(client, tokenizer, chunk) for chunk in chunks))
            for chunk, equal in zip(chunks, same, strict=True):
                if not equal:
                    raise await self._difference(client, tokenizer, chunk)

    async def logprobs(self, batch: PackedBatch) -> FloatArray:
        """Return the logprobs `[tokens]` of the generated tokens. Raises TeacherFailed."""
        values = np.zeros(len(batch.tokens), np.float32)
        batch = batch.conversations  # the server reads each by itself, as the learner does
        starts, lengths = batch.starts, batch.lengths
        async with self._endpoint.client() as client:

            async def fill(sequence: int) -> None:
                part = slice(starts[sequence], starts[sequence] + lengths[sequence])
                mask = batch.response_mask[part]
                if mask.any():
                    values[part][mask] = (await self._of_sequence(client, batch.tokens[part].tolist()))[mask]

            await gather_or_cancel(*map(fill, range(batch.sequences)))
        return values

    async def _of_sequence(self, client: httpx.AsyncClient, tokens: list[int]) -> FloatArray:
        """Return the logprob of each token given those before it, `[tokens]`; 0 for the first."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}

        def read(answer: Any) -> FloatArray:
            given = answer["choices"][0]["prompt_logprobs"]
            if len(given) != len(tokens):
                raise ValueError(f"prompt_logprobs has {len(given)} entries for {len(tokens)} tokens")
            found = [float(each[str(token)]["logprob"]) for each, token in zip(given[1:], tokens[1:], strict=True)]
            if odd := next((each for each in found if not math.isfinite(each)), None):
                raise ValueError(f"a logprob is {odd}")
            return np.array([0.0, *found], np.float32)

        return await self._ask(client, "POST", "/v1/completions", body, read)

    async def _same(self, client: httpx.AsyncClient, tokenizer: Any, tokens: Sequence[int]) -> bool:
        """Return whether the server reads the same text from these tokens as the policy's tokenizer."""
        return await self._text_of(client, tokens) == tokenizer.decode(tokens)

    async def _text_of(self, client: httpx.AsyncClient, tokens: Sequence[int]) -> str:
        body = {"model": self._model, "tokens": list(tokens)}
        return await self._ask(client, "POST", "/detokenize", body, lambda answer: str(answer["prompt"]))

    async def _difference(self, client: httpx.AsyncClient, tokenizer: Any, tokens: Sequence[int]) -> TeacherFailed:
        """Return the error for the first of these tokens that differs."""
        while len(tokens) > 1:
            half = len(tokens) // 2
            first = tokens[:half]
            tokens = tokens[half:] if await self._same(client, tokenizer, first) else first
        theirs, ours = await self._text_of(client, tokens), tokenizer.decode(tokens)
        what = f"{self._model!r} reads other tokens than the policy: its token {tokens[0]} is {theirs!r}, "
        return self._failed(f"{what}and the policy's is {ours!r}", "take a teacher with the policy's tokenizer")

    async def _ask(self, client: httpx.AsyncClient, method: str, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """Return what `read` makes of an answer. Raises TeacherFailed."""
        found = await self._endpoint.ask(client, method, path, body, lambda reply: read(reply.json()))
        if isinstance(found, Failed):
            hint = f"look at the server, at token_env and at timeout_s ({self._teacher.timeout_s:g} s)"
            raise TeacherFailed(f"teacher {self._teacher.name!r} at {found.cause}; {hint}, and resume the run")
        return found

    def _failed(self, what: str, hint: str) -> TeacherFailed:
        return TeacherFailed(f"teacher {self._teacher.name!r} at {self._url}: {what}; {hint}")


def _tokenizer_of(model: ModelSpec) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import

    return AutoTokenizer.from_pretrained(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code)


def _first_model(answer: Any) -> dict[str, Any]:
    first: dict[str, Any] = answer["data"][0]
    if not isinstance(first["id"], str):
        raise TypeError("the model's id is no text")
    return first
