"""Random generators of requests: where they start, and how they go back.

A request's generator starts at its seed. If the request's prompt ends with response tokens, the generator must continue
as if it had drawn them itself; otherwise the random numbers of the first tokens would be used again for the rest.

A prefill that takes several iterations draws a token in each, which vLLM throws away; it then sets the generator back
by an offset that generators of CPUs do not have, and the engine would end with an error.
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
"""Key in `SamplingParams.extra_args`: (how many tokens at the prompt's end were drawn with the request's seed, size of
the vocabulary)."""

EARLIER = "rlhfless_earlier"
"""Key in `SamplingParams.extra_args`: SampleRequest.earlier, each `packed`."""


def packed(tokens: Sequence[int]) -> bytes:
    """The tokens of a response as bytes: vLLM copies a request's parameters number by number, and bytes at once."""
    return array("i", tokens).tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """What `packed` was given."""
    return array("i", tokens).tolist()


def advance(generator: torch.Generator, drawn_tokens: int, vocabulary_tokens: int) -> None:
    """Take from the generator what vLLM's sampler takes for `drawn_tokens` tokens.

    On CPU that is one integer per token, the seed of the token's noise; elsewhere one exponential per entry of the
    vocabulary (vllm/v1/sample/ops/topk_topp_sampler.py), call by call, because a CUDA generator moves by calls.
    """
    if current_platform.is_cpu():
        torch.randint(0, 2**31, (drawn_tokens,), generator=generator, dtype=torch.long)
        return
    noise = torch.empty(vocabulary_tokens, dtype=torch.float32, device=generator.device)
    for _ in range(drawn_tokens):
        noise.exponential_(generator=generator)


class RewindingGenerator(torch.Generator):
    """A generator on a CPU. Setting its offset puts it behind the tokens that its request has."""

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
    """vLLM's state of a request in a worker, made when the request is first scheduled."""

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
    """Make the model runner of this worker use ContinuedRequestState. Idempotent.

    vLLM's newer runner for GPUs (vllm/v1/worker/gpu) needs nothing: its noise follows from seed and position.
    """
    runner: Any = gpu_model_runner
    runner.CachedRequestState = ContinuedRequestState
