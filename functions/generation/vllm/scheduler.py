"""vLLM's schedulers, modified to send tokens and logprobs to the front end every `EVERY` iterations.

A sample is returned whole, so delaying loses nothing. By default vLLM turns the logprobs of each request and
iteration into three numpy arrays, encodes them, decodes them in the front end and walks them there: ten times the
cost of the token. Here the logprobs of an iteration become one list, requests keep theirs in the core, and each
message to the front end has one array.

Everything kept is sent when a request ends or is aborted, and before a pause for a weight load completes, so tokens
never cross a change of version. Requests with stop texts send each token, because the front end searches for the
texts. An iteration that sends nothing else still sends an empty message, so the front end can accept requests
meanwhile.

vLLM imports this module in its core's process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rlhfless.functions.generation.vllm import lora_repairs
from rlhfless.functions.generation.vllm.arguments import SHARED
from rlhfless.functions.generation.vllm.iteration_shares import SHARES, IterationShares, shares_of

EVERY = 16
"""Iterations between two messages of a request."""

_UNUSED = np.empty(0, np.int32)
"""Placeholder for token IDs and ranks, which the front end already has or does not use."""


@dataclass(slots=True)
class _Kept:
    """Output of a request since its last message."""

    client: int
    every: int
    age: int
    """Iterations since the last message. The initial value differs between requests, so that requests that start
    together are not all sent in the same iteration."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likely: int = 0
    """Number of most likely first tokens to send; 0 once they were."""
    first: tuple[np.ndarray, np.ndarray] = (_UNUSED, _UNUSED)
    """The most likely first tokens, and their logprobs."""
    prefill_stats: PrefillStats | None = None

    def moved_to(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Move everything kept into `output`."""
        output.new_token_ids, self.token_ids = self.token_ids, []
        if self.logprobs:
            values = np.array(self.logprobs, np.float32).reshape(-1, 1)
            token_ids, chances = self.first
            # The field of the ranks, which nothing uses, has the logprobs of the most likely first tokens.
            output.new_logprobs, self.logprobs = LogprobsLists(token_ids, values, chances), []
            self.first = (_UNUSED, _UNUSED)
        output.prefill_stats, self.prefill_stats = self.prefill_stats, None
        self.age = 0
        return output


class _Keeping(Scheduler if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin for both of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[str, _Kept] = {}
        """By ID, for unfinished requests that ask for logprobs."""
        self._aborted: list[tuple[int, EngineCoreOutput]] = []
        """Unsent last outputs of aborted requests, with their client."""
        self._requests_seen = 0
        self.shares = IterationShares()
        self._is_shared = os.environ.get(SHARED) == "1"

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        began_s = time.monotonic()
        scheduled = super().schedule(*args, **kwargs)
        if self._is_shared:
            self.shares.begin(id(scheduled), began_s)
        return scheduled

    def _tokens_of_runs(self, scheduled: SchedulerOutput) -> dict[str, tuple[int, int]]:
        """Return the prompt and generated tokens of each run in an iteration."""
        tokens: dict[str, tuple[int, int]] = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(name)
            adapter = None if request is None else request.lora_request
            if request is None or adapter is None:
                continue
            run_id = adapter.lora_name.partition("/")[0]
            prompt, generated = tokens.get(run_id, (0, 0))
            if request.num_output_tokens:
                tokens[run_id] = prompt, generated + count
            else:
                tokens[run_id] = prompt + count, generated
        return tokens

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        asked = request.sampling_params
        if asked is not None and asked.num_logprobs is not None:
            self._requests_seen += 1
            every = 1 if asked.stop else EVERY
            age, likely = self._requests_seen % every, asked.num_logprobs
            self._kept[request.request_id] = _Kept(request.client_index, every, age, likely=likely)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED:
            for request in finished:
                if (kept := self._kept.pop(request.request_id, None)) is not None:
                    last = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
                    self._aborted.append((kept.client, kept.moved_to(last)))
        return finished

    def has_finished_requests(self) -> bool:
        # The core runs another iteration while this is true. A pause for a weight load completes only after the last
        # iteration, and so after everything kept was sent with the version that generated it.
        pausing = self.pause_state is PauseState.PAUSED_ALL
        unsent = pausing and any(kept.token_ids for kept in self._kept.values())
        return unsent or bool(self._aborted) or super().has_finished_requests()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._is_shared:
            self.shares.end(id(scheduler_output), self._tokens_of_runs(scheduler_output), time.monotonic())
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        sent = super().update_from_output(scheduler_output, model_runner_output)
        sampled = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
        rows = model_runner_output.req_id_to_index
        for message in sent.values():
            message.outputs = [each for each in message.outputs if self._is_due(each, sampled, logprobs, rows)]
        extra, self._aborted = self._aborted, []
        if self.pause_state is PauseState.PAUSED_ALL:
            for name, kept in self._kept.items():
                if kept.token_ids:
                    extra.append((kept.client, kept.moved_to(EngineCoreOutput(name, []))))
        for client, output in extra:
            sent.setdefault(client, EngineCoreOutputs(outputs=[])).outputs.append(output)
        return sent

    def _is_due(
        self, output: EngineCoreOutput, sampled: list[float], logprobs: LogprobsLists | None, rows: dict[str, int]
    ) -> bool:
        """Keep the output, or move everything kept into it and return True."""
        kept = self._kept.get(output.request_id)
        if kept is None:
            return True
        if tokens := output.new_token_ids:
            row = rows[output.request_id]
            starts = None if logprobs is None else logprobs.cu_num_generated_tokens
            first = row if starts is None else starts[row]
            kept.token_ids += tokens
            kept.logprobs += sampled[first : first + len(tokens)]
            if kept.likely and logprobs is not None:
                likely = slice(1, 1 + kept.likely)  # the first column is the sampled token
                kept.first = logprobs.logprob_token_ids[first, likely], logprobs.logprobs[first, likely]
                kept.likely = 0
        kept.prefill_stats = kept.prefill_stats or output.prefill_stats
        kept.age += 1
        if output.finish_reason is not None:
            del self._kept[output.request_id]
        elif kept.age < kept.every:
            return False
        kept.moved_to(output)
        return True


def scheduler_class(config: SchedulerConfig) -> str:
    """Return the import path of the class that matches vLLM's own choice."""
    return f"{__name__}.{'AsyncKeepingScheduler' if config.async_scheduling else 'KeepingScheduler'}"


class KeepingScheduler(_Keeping, Scheduler):
    """For engines that schedule an iteration when the previous one has ended."""


class AsyncKeepingScheduler(_Keeping, AsyncScheduler):
    """For engines that schedule an iteration while the previous one runs."""


class SampledLogprobs(LogprobsProcessor):
    """Front-end counterpart: `logprobs` is a plain list [response] of the sampled tokens' logprobs."""

    def __init__(self) -> None:
        super().__init__(None, [], None, None, 0, None)
        self.first: list[tuple[int, float]] = []
        """The most likely first tokens and their logprobs, if the request asks for them."""

    def update_from_output(self, output: EngineCoreOutput) -> None:
        if output.new_logprobs is not None:
            assert isinstance(self.logprobs, list)
            new = output.new_logprobs
            self.logprobs += new.logprobs[:, 0].tolist()
            self.first += zip(new.logprob_token_ids.tolist(), new.sampled_token_ranks.tolist(), strict=True)


lora_repairs.install()
setattr(EngineCore, SHARES, shares_of)
