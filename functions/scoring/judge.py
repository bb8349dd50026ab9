"""A judge with a model of its own: an engine on devices that it holds only while it judges.

The questions and verdicts are those of a judge behind a server (rlhfless.rewards.judge); only what answers differs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.functions.base import CallResult, admitted
from rlhfless.functions.calls import Call, CallUsage
from rlhfless.functions.generation.engine import (
    Device,
    Engine,
    EngineDead,
    EngineError,
    EngineSettings,
    EngineTimeout,
    SampleRequest,
)
from rlhfless.functions.generation.engine_function import EngineFunction, EngineFunctionSettings
from rlhfless.functions.launching import Launch, binding, is_shared
from rlhfless.functions.scoring.deployment import score_groups
from rlhfless.records import Group, Score
from rlhfless.rewards import Failed, Rewards
from rlhfless.rewards.judge import chat_tokens
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.memory import GIB
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import EngineSpec, JudgeSpec, RunSpec, ScoringSpec
from rlhfless.spec.base import MOST_TOKENS
from rlhfless.weights.address import StoreAddress

NO_LIMIT = -1
"""vLLM's `max_model_len` for the model's own limit, or as many tokens as the KV cache holds."""


def engine_settings(judge: JudgeSpec, run: RunSpec, device: Device, folder: str) -> EngineSettings:
    """Return the settings of a judge's engine, which may keep files in `folder`."""
    assert judge.path is not None, "only judges with a path have an engine"
    return EngineSettings(
        model=judge.path,
        tokenizer=judge.path,
        dtype=judge.dtype,
        max_model_len=judge.max_context_tokens or NO_LIMIT,
        seed=0,
        trust_remote_code=judge.trust_remote_code,
        device=device,
        store=StoreAddress("file", folder),  # it loads no weights but the model's
        engine=EngineSpec(tensor_parallel_size=judge.tensor_parallel_size, kv_cache_gib=judge.kv_cache_gib),
        timeouts=run.timeouts,
        kv_bytes=int(judge.kv_cache_gib * GIB),
        sleeps=run.placement.in_turns,
    )


class EngineAnswers:
    """Answers chat completion requests with a judge's engine."""

    def __init__(self, judge: JudgeSpec, engine: Engine) -> None:
        from transformers import AutoTokenizer  # takes seconds to import

        self._path, self._engine = judge.path, engine
        self._tokenizer: Any = AutoTokenizer.from_pretrained(judge.path, trust_remote_code=judge.trust_remote_code)
        self._numbers = itertools.count()
        self._usage = CallUsage()

    async def __call__(self, body: Mapping[str, Any]) -> dict[str, Any] | Failed:
        """Answer the body of a request as an OpenAI-compatible server does. Raises EngineDead and EngineTimeout."""
        try:
            token_ids = chat_tokens(self._tokenizer, body)
        except Exception as error:  # a template is a program by the model's author, and may raise any error
            return Failed(f"{self._path}: its chat template fails: {type(error).__name__}: {error}")
        likely = body.get("top_logprobs", 0)
        request = SampleRequest(
            request_id=str(next(self._numbers)),
            token_ids=token_ids,
            seed=body.get("seed", _seed(body)),
            max_tokens=body.get("max_tokens", MOST_TOKENS),
            # Logprobs are the model's own, as those of a server.
            temperature=1.0 if likely else body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            top_k=body.get("top_k", 0),
            stop=(stop,) if isinstance(stop := body.get("stop", ()), str) else tuple(stop),
            top_logprobs=likely,
        )
        try:
            sampled = await self._engine.sample(request)
        except (EngineDead, EngineTimeout):
            raise
        except EngineError as error:  # it refuses the request; its own errors come as tracebacks
            return Failed(f"{self._path}: {str(error).strip().splitlines()[-1]}")
        self._usage = replace(
            self._usage,
            input_tokens=self._usage.input_tokens + len(token_ids),
            output_tokens=self._usage.output_tokens + len(sampled.token_ids),
            cached_tokens=self._usage.cached_tokens + sampled.cached_tokens,
        )
        ranked = [{"token": token, "logprob": logprob} for token, logprob in sampled.first]
        choice = {"message": {"content": sampled.text}, "finish_reason": str(sampled.finish_reason)}
        return {"choices": [choice | {"logprobs": {"content": [{"top_logprobs": ranked}]}}]}

    def take_usage(self) -> CallUsage:
        """Return the work since the last call of this method."""
        usage, self._usage = self._usage, CallUsage()
        return usage


def _seed(body: Mapping[str, Any]) -> int:
    """Return the same seed for equal questions, so that a repeated step has the same verdicts."""
    return int(hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:7], 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings(EngineFunctionSettings):
    """Settings of a judge's replica."""

    judge: JudgeSpec
    scoring: ScoringSpec


class JudgeFunction(EngineFunction):
    """A judge's replica. A lost engine loses no sample: the step is scored again (docs/faults.md)."""

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> JudgeSettings:
        """Return a replica's settings for an allocation with bound devices."""
        on, folder = binding(allocation.devices, exclusive=False, shared=is_shared(allocation)), launch.run_folder
        return JudgeSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            engine=engine_settings(kind.settings, launch.spec, on.kind, str(folder.absolute())),
            binding=on,
            run_folder=str(folder.absolute()),
            planned=launch.planned(kind, allocation),
            judge=kind.settings,
            scoring=launch.spec.scoring,
        )

    async def __init__(self, settings: JudgeSettings) -> None:  # type: ignore[misc]
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors
        if self._unfit is not None:
            return
        judge = settings.judge
        self._answers = EngineAnswers(judge, self._engine)
        self._rewards = Rewards((judge,), settings.scoring, {judge.label: self._answers})

    @admitted
    async def score(self, _: Call, groups: Sequence[Group]) -> CallResult[list[list[Score]]]:
        """Return the judge's part of every sample's score, in order. Raises FunctionBroken if the engine fails."""
        with self.engine_faults("judging"):
            scores = await score_groups(self._rewards, groups)
        return CallResult(scores, replace(self._answers.take_usage(), sequences=sum(map(len, scores))))
