"""Sample the same tokens whatever is drafted and wherever a request resumes.

Speculation changes when a token is generated, never which: drafts are verified by sampling. vLLM's rejection sampling
(Leviathan et al., arXiv 2211.17192) preserves the distribution of a response but changes the response, because it
consumes other random numbers with drafts than without. Here each position samples the target's own token with the
noise that it would have had without drafts, and a draft is accepted if it equals that token. The probability of that
is p(draft), the same as in rejection sampling when a draft is a token and not a distribution (n-grams, suffixes,
greedy draft models and heads). Seeded samples are therefore the same at any depth, and drafts may come from any
source.

Invariant: after each iteration, a request's generator has advanced by exactly the request's tokens.

A request's generator starts at its seed. If the prompt ends with response tokens, the generator must resume as if it
had generated them itself; otherwise the random numbers of the first tokens would be reused for the rest. A prefill
that takes several iterations samples a token in each, which vLLM discards; it then rewinds the generator by an offset
that CPU generators lack, and the engine would fail.

Not supported: penalties, bad words, allowed tokens and logits processors, none of which a `SampleRequest` has.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState


def verify(
    sampler: RejectionSampler,
    metadata: SpecDecodeMetadata,
    draft_probs: torch.Tensor | None,  # noqa: ARG001 (a draft is accepted for what is drawn, however it was found)
    logits: torch.Tensor,
    sampling: SamplingMetadata,
) -> SamplerOutput:
    """Replace `RejectionSampler.forward`.

    `logits` [rows, vocabulary]: per request, a row for each draft plus one more, in order.
    """
    rows = [drafts + 1 for drafts in metadata.num_draft_tokens]
    before = {request: generator.get_state() for request, generator in sampling.generators.items() if rows[request] > 1}
    drawn = sampler.sampler(logits=logits, sampling_metadata=_of_rows(sampling, rows, logits.device))
    starts = torch.tensor([0, *accumulate(rows)], device=logits.device)
    drafts = torch.full((sum(rows),), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=logits.device)
    drafts[metadata.target_logits_indices.long()] = metadata.draft_token_ids.to(torch.int32)
    kept, emitted, where = accepted(drawn.sampled_token_ids[:, 0], drafts, starts, max(rows))
    counts = emitted.tolist() if before else []
    for request, state in before.items():
        if counts[request] < rows[request]:
            sampling.generators[request].set_state(state)
            advance(sampling.generators[request], counts[request], logits.shape[-1])
    return SamplerOutput(sampled_token_ids=kept.to(torch.int32), logprobs_tensors=_at(drawn.logprobs_tensors, where))


def accepted(
    drawn: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens that requests keep: the drafts before the first mismatch, and the token sampled there.

    `drawn`, `drafts` [rows]: the token sampled by a row, and the draft that the next row read in its place; the
    draft of a request's last row is ignored. `starts` [requests + 1]: the first row of each request.

    Returns the kept tokens [requests, width], padded with PLACEHOLDER_TOKEN_ID; their number [requests]; and the row
    of each place [requests, width].
    """
    places = torch.arange(width, device=drawn.device)
    where = starts[:-1, None] + places
    followed = where + 1 < starts[1:, None]
    where = where.clamp(max=drawn.shape[0] - 1)
    agree = (drawn == drafts)[where] & followed
    emitted = 1 + agree.long().cumprod(1).sum(1)
    kept = drawn[where].masked_fill(places >= emitted[:, None], PLACEHOLDER_TOKEN_ID)
    return kept, emitted, where


def verify_by_position(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,  # noqa: ARG001 (see verify)
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,  # noqa: ARG001
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,  # noqa: ARG001
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,  # noqa: ARG001
    use_fp64: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `rejection_sample` of vLLM's newer GPU runner.

    Its noise follows from seed and position, so that no generator must be rewound. `target_logits` [rows,
    vocabulary] are processed, `draft_sampled` [rows] is the token that a row read, `cu_num_logits` [requests + 1] is
    the first row of each request.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    drawn = gumbel_sample(
        target_logits,
        expanded_idx_mapping,
        temperature,
        seed,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    kept, emitted, _rows = accepted(drawn, draft_sampled.roll(-1), cu_num_logits, num_speculative_steps + 1)
    return kept, emitted.to(torch.int32)


def _of_rows(sampling: SamplingMetadata, rows: Sequence[int], device: torch.device) -> SamplingMetadata:
    """Return the metadata with an entry per row, as if each row were a request.

    A generator appears once for each of its rows, and the sampler consumes their noise in this order.
    """
    each = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).to(device)
    starts = [0, *accumulate(rows)]

    def repeated(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[each]

    return replace(
        sampling,
        temperature=repeated(sampling.temperature),
        top_p=repeated(sampling.top_p),
        top_k=repeated(sampling.top_k),
        generators={
            row: generator
            for request, generator in sampling.generators.items()
            for row in range(starts[request], starts[request + 1])
        },
    )


def _at(logprobs: LogprobsTensors | None, where: torch.Tensor) -> LogprobsTensors | None:
    """Return the logprobs of the rows `where`."""
    if logprobs is None:
        return None
    rows = where.flatten()
    return LogprobsTensors(
        logprobs.logprob_token_ids[rows], logprobs.logprobs[rows], logprobs.selected_token_ranks[rows]
    )


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
    """Make this worker's model runner verify and resume this way. Idempotent.

    vLLM's newer GPU runner (vllm/v1/worker/gpu) needs no ContinuedRequestState: its noise follows from seed and
    position.
    """
    forward: Any = verify
    rejection_sampler.RejectionSampler.forward = forward  # type: ignore[method-assign]
    runner: Any = gpu_model_runner
    runner.CachedRequestState = ContinuedRequestState
    if not current_platform.is_cpu():
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler as newer

        newer_module: Any = newer
        newer_module.rejection_sample = verify_by_position
