"""Drafts are verified by drawing: with vLLM's own sampler, and without an engine.

vLLM is imported in the tests: it takes seconds, in each process that reads this file.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine

WORDS = 8
"""Tokens of the vocabulary."""


def sampler() -> Any:
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    return RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))


def metadata(generators: dict[int, torch.Generator], temperatures: Sequence[float]) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.empty(0)
    greedy = [temperature == 0 for temperature in temperatures]
    return SamplingMetadata(
        temperature=None if all(greedy) else torch.tensor(temperatures),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=None,
        top_k=None,
        generators=generators,
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def drafts_of(drafts: Sequence[Sequence[int]]) -> Any:
    """The fields of vLLM's SpecDecodeMetadata that are used."""
    starts, targets = 0, []
    for draft in drafts:
        targets += range(starts, starts + len(draft))
        starts += len(draft) + 1
    return SimpleNamespace(
        num_draft_tokens=[len(draft) for draft in drafts],
        draft_token_ids=torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32),
        target_logits_indices=torch.tensor(targets, dtype=torch.int32),
    )


def logits_after(response: Sequence[int]) -> torch.Tensor:
    """[WORDS]: a model that looks at the last two tokens."""
    seed = 100 * (response[-1] if response else 0) + (response[-2] if len(response) > 1 else 0)
    return 2 * torch.randn(WORDS, generator=torch.Generator().manual_seed(seed))


def seeded(request: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + request)


def undrafted(tokens: int, temperatures: Sequence[float]) -> tuple[list[list[int]], list[list[float]]]:
    """Responses and logprobs, a token at a time."""
    draw = sampler().sampler
    responses: list[list[int]] = [[] for _ in temperatures]
    logprobs: list[list[float]] = [[] for _ in temperatures]
    generators = {request: seeded(request) for request, t in enumerate(temperatures) if t}
    for _ in range(tokens):
        logits = torch.stack([logits_after(response) for response in responses])
        drawn = draw(logits=logits, sampling_metadata=metadata(generators, temperatures))
        for request, (token,) in enumerate(drawn.sampled_token_ids.tolist()):
            responses[request].append(token)
            logprobs[request].append(float(drawn.logprobs_tensors.logprobs[request, 0]))
    return responses, logprobs


Guess = Callable[[int, int], list[int]]
"""`guess(request, tokens)`: drafts of a request that has so many tokens."""


def drafted(
    tokens: int, temperatures: Sequence[float], guess: Guess
) -> tuple[list[list[int]], list[list[float]], dict[int, torch.Generator]]:
    """The same with drafts: until each response has `tokens`."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from rlhfless.functions.generation.vllm.verification import verify

    responses: list[list[int]] = [[] for _ in temperatures]
    logprobs: list[list[float]] = [[] for _ in temperatures]
    generators = {request: seeded(request) for request, t in enumerate(temperatures) if t}
    while min(map(len, responses)) < tokens:
        drafts = [guess(request, len(response)) for request, response in enumerate(responses)]
        read = [
            [*response, *draft[:n]]
            for response, draft in zip(responses, drafts, strict=True)
            for n in range(len(draft) + 1)
        ]
        logits = torch.stack([logits_after(tokens) for tokens in read])
        drawn = verify(sampler(), drafts_of(drafts), None, logits, metadata(generators, temperatures))
        width = max(map(len, drafts)) + 1
        kept, _ = RejectionSampler.parse_output(drawn.sampled_token_ids, WORDS)
        for request, new in enumerate(kept):
            responses[request] += new
            logprobs[request] += drawn.logprobs_tensors.logprobs[
                request * width : request * width + len(new), 0
            ].tolist()
    return responses, logprobs, generators


MIXED = (1.0, 0.0, 0.7, 1.3, 1.0, 0.0)


@pytest.mark.parametrize("temperatures", [MIXED, (0.0, 0.0)], ids=["mixed", "greedy"])
def test_samples_and_logprobs_are_those_without_drafts_at_any_depth(temperatures: Sequence[float]) -> None:
    expected, of_them = undrafted(60, temperatures)
    choice = random.Random(3)

    def guess(request: int, tokens: int) -> list[int]:
        """Up to four of the coming tokens, some of which are wrong; often none."""
        right = expected[request][tokens : tokens + choice.randrange(5)]
        return [token if choice.random() < 0.7 else choice.randrange(WORDS) for token in right]

    responses, logprobs, _ = drafted(50, temperatures, guess)
    for request, response in enumerate(responses):
        assert response[:50] == expected[request][:50]
        assert logprobs[request][:50] == of_them[request][:50]


def test_a_generator_is_behind_the_tokens_that_its_request_has() -> None:
    expected, _ = undrafted(60, MIXED)
    responses, _, generators = drafted(20, MIXED, lambda request, tokens: [*expected[request][tokens : tokens + 2], 0])
    for request, generator in generators.items():
        fresh = seeded(request)
        torch.randint(0, 2**31, (len(responses[request]),), generator=fresh, dtype=torch.long)
        assert torch.equal(generator.get_state(), fresh.get_state())


def test_the_target_s_distribution_is_kept() -> None:
    """Chi-square of 131,072 first tokens, and of the second ones where the draft was accepted, at the 99.99 % quantile
    for 7 degrees of freedom, 29.88. Every eighth request has a seed of its own."""
    from rlhfless.functions.generation.vllm.verification import verify

    batch, passes = 16_384, 8
    first = logits_after([])
    draft = int(first.argmax())
    second = logits_after([draft])
    counts = torch.zeros(2, WORDS)
    torch.manual_seed(5)
    for number in range(passes):
        generators = {
            request: torch.Generator().manual_seed(number * batch + request) for request in range(0, batch, 8)
        }
        logits = torch.stack([first, second]).repeat(batch, 1)
        drawn = verify(sampler(), drafts_of([[draft]] * batch), None, logits, metadata(generators, [1.0] * batch))
        tokens = drawn.sampled_token_ids
        counts[0] += torch.bincount(tokens[:, 0], minlength=WORDS)
        counts[1] += torch.bincount(tokens[tokens[:, 0] == draft, 1], minlength=WORDS)
        assert bool((tokens[tokens[:, 0] != draft, 1] == -1).all())
    assert int(counts[0].sum()) == 131_072
    assert int(counts[1].sum()) == int(counts[0, draft]) > 20_000
    for seen, logits in zip(counts, (first, second), strict=True):
        expected = logits.softmax(0) * seen.sum()
        assert float(((seen - expected) ** 2 / expected).sum()) < 29.88


def test_what_requests_keep() -> None:
    """Three requests with 3, 0 and 2 drafts. The first draws 5 6 9 1 for the drafts 5 6 7: it keeps 5 6 9. The third
    draws 1 2 3 for the drafts 1 2: all of them, and one more. What stands in place of a last row's draft is ignored."""
    from rlhfless.functions.generation.vllm.verification import accepted

    drawn = torch.tensor([5, 6, 9, 1, 4, 1, 2, 3])
    drafts = torch.tensor([5, 6, 7, 1, 4, 1, 2, 3])
    kept, emitted, where = accepted(drawn, drafts, torch.tensor([0, 4, 5, 8]), 4)
    assert kept.tolist() == [[5, 6, 9, -1], [4, -1, -1, -1], [1, 2, 3, -1]]
    assert emitted.tolist() == [3, 1, 3]
    assert where[:, 0].tolist() == [0, 4, 5]


def test_the_newer_runner_keeps_the_tokens_that_it_draws_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise needs a GPU; here it is given. Rows read 8 5 6 7 | 3 | 2 1: the drafts are 5 6 7, none, and 1."""
    from rlhfless.functions.generation.vllm.verification import verify_by_position

    noise = ModuleType("vllm.v1.worker.gpu.sample.gumbel")
    asked: dict[str, Any] = {}

    def gumbel_sample(*inputs: Any, **switches: Any) -> torch.Tensor:
        asked.update(switches, pos=inputs[4].tolist())
        return torch.tensor([5, 6, 9, 1, 2, 4, 3])

    noise.gumbel_sample = gumbel_sample  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, noise.__name__, noise)
    rows = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    kept, emitted = verify_by_position(
        torch.zeros(7, WORDS), None, torch.tensor([8, 5, 6, 7, 3, 2, 1], dtype=torch.int32), torch.tensor([0, 4, 5, 7]),
        torch.tensor([10, 11, 12, 13, 3, 7, 8]), torch.arange(3), rows, rows, torch.ones(3), torch.arange(3), 3,
    )  # fmt: skip
    assert kept.tolist() == [[5, 6, 9, -1], [2, -1, -1, -1], [4, -1, -1, -1]]
    assert emitted.tolist() == [3, 1, 1]
    assert asked == {
        "apply_temperature": False, "is_drafting": False, "use_fp64": False, "pos": [10, 11, 12, 13, 3, 7, 8],
    }  # fmt: skip
