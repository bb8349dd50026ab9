"""Position the random generators of requests: where they start and how they rewind.

A request's generator starts at its seed. If the prompt ends with response tokens, the generator must resume as if it
had generated them itself; otherwise the random numbers of the first tokens would be reused for the rest.

A prefill that takes several iterations samples a token in each, which vLLM discards; it then rewinds the generator
by an offset that CPU generators lack, and the engine would fail.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

DRAWN = "rlhfless_drawn"
"""Key in `SamplingParams.extra_args`: (number of tokens at the prompt's end generated with the request's seed, size
of the vocabulary)."""

EARLIER = "rlhfless_earlier"
"""Key in `SamplingParams.extra_args`: SampleRequest.earlier, each `packed`."""


def packed(tokens: Sequence[int]) -> bytes:
    """Pack tokens into bytes: vLLM copies a request's parameters number by number, but bytes at once."""
    return array("i", tokens).tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """Unpack the bytes of `packed`."""
    return array("i", tokens).tolist()


def advance(generator: torch.Generator, drawn_tokens: int, vocabulary_tokens: int) -> None:
    """Advance the generator past what vLLM's sampler consumes for `drawn_tokens` tokens.

    On CPU that is one integer per token, the seed of the token's noise; elsewhere one exponential per entry of the
    vocabulary (vllm/v1/sample/ops/topk_topp_sampler.py), call by call, because a CUDA generator advances by calls.
    """
    if current_platform.is_cpu():
        torch.randint(0, 2**31, (drawn_tokens,), generator=generator, dtype=torch.long)
        return
    noise = torch.empty(vocabulary_tokens, dtype=torch.float32, device=generator.device)
    for _ in range(drawn_tokens):
        noise.exponential_(generator=generator)


class RewindingGenerator(torch.Generator):
    """A CPU generator; setting its offset moves it past the tokens that its request has."""

    def __new__(cls, state: CachedRequestState) -> RewindingGenerator:  # noqa: ARG004 (of __init__)
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]

    def __init__(self, state: CachedRequestState) -> None:
        self._state = weakref.ref(state)
        self.set_offset(0)

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:  # noqa: ARG002
        state = self._state()
        assert state is not None
        assert state.sampling_params is not None
        assert state.sampling_params.seed is not None
        self.manual_seed(state.sampling_params.seed)
        extra = state.sampling_params.extra_args or {}
        before, vocabulary_tokens = extra.get(DRAWN, (0, 0))
        advance(self, before + len(state.output_token_ids), vocabulary_tokens)
        return self


@dataclass
class ContinuedRequestState(CachedRequestState):
    """vLLM's state of a request in a worker, created when the request is first scheduled."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        extra = (self.sampling_params.extra_args if self.sampling_params else None) or {}
        if self.generator is None:
            return
        if current_platform.is_cpu():
            self.generator = RewindingGenerator(self)
        elif DRAWN in extra:
            advance(self.generator, *extra[DRAWN])


def install() -> None:
    """Make this worker's model runner use ContinuedRequestState. Idempotent.

    vLLM's newer GPU runner (vllm/v1/worker/gpu) needs nothing: its noise follows from seed and position.
    """
    runner: Any = gpu_model_runner
    runner.CachedRequestState = ContinuedRequestState
