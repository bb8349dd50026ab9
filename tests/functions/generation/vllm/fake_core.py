"""Our `Core` with vLLM's real scheduler, engine core and frontend, and an executor that computes no model.

Tokens and logprobs are functions of prompt and position. Import this module only inside tests, because it imports vLLM
into the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from rlhfless.functions.generation.engine import EngineSettings
from rlhfless.functions.generation.vllm import core as core_module
from rlhfless.functions.generation.vllm.arguments import engine_arguments
from rlhfless.functions.generation.vllm.core import Core
from rlhfless.spec import EngineSpec, TimeoutsSpec
from rlhfless.weights.address import StoreAddress

ANSWERS: dict[str, Any] = {
    "get_kv_cache_spec": {"layer": FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)},
    "get_supported_kv_cache_layouts": ["NHD"],
    "determine_available_memory": 2**26,
    "get_supported_tasks": ("generate",),
    "supports_draft_weight_updates": False,
    "rlhfless_start": ({}, 0),
    "rlhfless_backends": {},
    "rlhfless_draft_times": (0.0, 0.0),
}


def token_at(prompt: tuple[int, ...], place: int) -> int:
    """Return a token above 2, so that it never ends a sequence."""
    return 3 + (7 * sum(prompt) + 13 * place) % 90


def logprob_at(prompt: tuple[int, ...], place: int) -> float:
    return float(np.float32(-0.01 * (1 + (sum(prompt) + 5 * place) % 317)))


class FakeExecutor(Executor):
    """Generates a token for each request whose prefix is fully computed. `widths` sets the number of tokens per pass,
    as with verified drafts."""

    widths = (1,)

    def _init_executor(self) -> None:
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._generated: dict[str, int] = {}
        self._passed: ModelRunnerOutput | None = None

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def check_health(self) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        return [ANSWERS[method]] if method in ANSWERS else []

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT, non_block)
        self._passed = self._pass(scheduler_output)
        return _done(None, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._passed, non_block)

    def _pass(self, scheduled: Any) -> ModelRunnerOutput:
        computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id], self._generated[new.req_id] = tuple(new.prompt_token_ids), 0
            computed[new.req_id] = new.num_computed_tokens
        again = scheduled.scheduled_cached_reqs
        computed |= zip(again.req_ids, again.num_computed_tokens, strict=True)
        tokens: list[list[int]] = []
        logprobs: list[float] = []
        starts = [0]
        for name, before in computed.items():
            prompt, place = self._prompts[name], self._generated[name]
            whole = before + scheduled.num_scheduled_tokens[name] >= len(prompt) + place
            places = range(place, place + self.widths[place % len(self.widths)] * whole)
            tokens.append([token_at(prompt, each) for each in places])
            # A row that generates nothing has logprobs nevertheless, as in vLLM.
            logprobs += [logprob_at(prompt, each) for each in places] or [0.0]
            starts.append(len(logprobs))
            self._generated[name] += len(places)
        values = np.array(logprobs, np.float32).reshape(-1, 1)
        drawn = np.array([token for each in tokens for token in each or [0]], np.int32).reshape(-1, 1)
        rows = {name: row for row, name in enumerate(computed)}
        several = starts if max(self.widths) > 1 else None
        lists = LogprobsLists(drawn, values, np.zeros(len(values), np.int32), several)
        return ModelRunnerOutput(list(rows), rows, tokens, lists)


class Several(FakeExecutor):
    widths = (1, 3, 2)


def _done(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future = Future[Any]()
    future.set_result(value)
    return future


@contextmanager
def fake_core(
    model: Path, *, asynchronous: bool = False, own: bool = True, several: bool = False, sequences: int = 256
) -> Iterator[Core]:
    """Start a core. `own`: use our scheduler instead of vLLM's. `several`: passes yield several tokens per request."""
    settings = EngineSettings(
        str(model), str(model), "float32", 256, 0, False, "cpu", StoreAddress("file", str(model.parent / "store")),
        EngineSpec(max_sequences=sequences, kv_cache_gib=0.5), TimeoutsSpec(),
    )  # fmt: skip
    executor = "Several" if several else "FakeExecutor"
    arguments = engine_arguments(settings) | {
        "distributed_executor_backend": f"{__name__}.{executor}",
        "async_scheduling": asynchronous,
    }
    del arguments["worker_extension_cls"], arguments["weight_transfer_config"]
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(core_module, "engine_arguments", return_value=arguments))
        patched.enter_context(
            mock.patch.dict("os.environ", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
        )
        if not own:
            patched.enter_context(mock.patch.object(core_module, "scheduler_class", return_value=None))
        yield Core(settings)


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def encoded(
    core: Core, messages: list[tuple[int, int]], encoding: Wrapper = lambda it: it, decoding: Wrapper = lambda it: it
) -> Iterator[None]:
    """Encode and decode the core's outputs within the block, as between processes.

    `messages` receives the number of outputs and bytes of each iteration. `encoding` and `decoding` may wrap the two
    functions, to time them.
    """
    client: Any = core._engine.engine_core
    encode, decode = encoding(MsgpackEncoder().encode), decoding(MsgpackDecoder(EngineCoreOutputs).decode)
    direct = client.get_output

    def get_output() -> Any:
        outputs = direct()
        frames = encode(outputs)
        messages.append((len(outputs.outputs), sum(memoryview(frame).nbytes for frame in frames)))
        return decode(frames)

    with mock.patch.object(client, "get_output", get_output):
        yield
