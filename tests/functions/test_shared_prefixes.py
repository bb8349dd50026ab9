"""Prefixes that are computed once give the logprobs, losses and gradients of the padded pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.builders import drawn
from fakes.tiny_learner import token_logprobs
from fakes.tiny_models import FAMILIES, save
from rlhfless.algorithms.base import LossInputs, algorithm_of
from rlhfless.algorithms.batch import PackedBatch, pack, select
from rlhfless.functions.batching import MicroBatch, cut, deal, fed_sequences, prompt_tokens
from rlhfless.functions.policy import PolicyNetwork, response_logprobs
from rlhfless.functions.policy_loading import load_policy
from rlhfless.functions.prefix_attention import PrefixLayout, shared_prefix_attention
from rlhfless.prefixes.packing import ALWAYS, JOIN_KEYS, NEVER, ON_CPUS, PackedSegments, Packing, SharingSequences
from rlhfless.records import Group, Prompt
from rlhfless.spec import GRPOSpec, ModelSpec

EXACT = 1e-9
"""Of the issue of exactness: far below the rounding of float32, far above that of float64."""

SHARING = {"qwen2": True, "llama": True, "granite": True, "gemma2": False, "qwen2_sliding": False}


def in_float64(path: str, *, gradient_checkpointing: bool = False) -> PolicyNetwork:
    policy = load_policy(
        ModelSpec(path=path),
        parameter_dtype="float32",
        compute_dtype="float32",
        device=torch.device("cpu"),
        gradient_checkpointing=gradient_checkpointing,
    )
    policy.model.double()
    return dataclasses.replace(policy, compute_dtype=torch.float64)


@pytest.fixture(scope="module")
def policy(tiny_model) -> PolicyNetwork:
    return in_float64(tiny_model)


@dataclasses.dataclass
class Passed:
    """Values, loss and gradients of a batch."""

    logprobs: np.ndarray
    entropy: np.ndarray
    loss: float
    gradients: list[torch.Tensor]


def passed(policy: PolicyNetwork, batch: PackedBatch, parts: Sequence[MicroBatch]) -> Passed:
    """Forward and backward over micro-batches: what a learner's optimiser step does. In float64 throughout: norms in
    transformers cast to `torch.float32` by that name, whatever the model's format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        return _passed(policy, batch, parts)


def _passed(policy: PolicyNetwork, batch: PackedBatch, parts: Sequence[MicroBatch]) -> Passed:
    policy.model.zero_grad()
    algorithm = algorithm_of(GRPOSpec())
    values, entropies, total = np.zeros(len(batch.tokens)), np.zeros(len(batch.tokens)), 0.0
    for micro_batch in parts:
        part = select(batch, micro_batch.indices)
        current = response_logprobs(policy, part, 0.8, micro_batch.packed)
        columns = {
            name: torch.from_numpy(column[part.response_mask])
            for name, column in part.columns().items()
            if name in ("rollout_logprobs", "advantages")
        }
        loss = algorithm.loss(
            LossInputs(
                current.logprobs,
                current.entropy,
                denominator_tokens=part.denominators.tokens,
                sequence_id=torch.from_numpy(part.sequence_id[part.response_mask]),
                denominator_sequences=part.denominators.sequences,
                **columns,
            )
        ).loss
        loss.backward()
        at = (np.repeat(batch.starts[micro_batch.indices], part.lengths) + part.positions)[part.response_mask]
        values[at], entropies[at] = current.logprobs.detach().numpy(), current.entropy.numpy()
        total += float(loss.detach())
    return Passed(values, entropies, total, [parameter.grad.clone() for parameter in policy.model.parameters()])


def assert_equal(ours: Passed, expected: Passed) -> None:
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=EXACT, rtol=0)
    np.testing.assert_allclose(ours.entropy, expected.entropy, atol=EXACT, rtol=0)
    assert ours.loss == pytest.approx(expected.loss, abs=EXACT)
    for mine, theirs in zip(ours.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=0)


def padded(batch: PackedBatch) -> list[MicroBatch]:
    """All sequences in one padded pass."""
    return [MicroBatch(answered(batch))]


def packed(batch: PackedBatch) -> list[MicroBatch]:
    """All sequences in one row."""
    return list(cut(batch, 10_000, packing=ON_CPUS).parts)


def answered(batch: PackedBatch) -> np.ndarray:
    return np.flatnonzero(batch.response_lengths > 0)


def whole(rows: Sequence[np.ndarray]) -> PackedSegments:
    return SharingSequences(np.concatenate(rows), np.array([len(row) for row in rows])).pack(np.arange(len(rows)))


@pytest.mark.parametrize("budget", [80, 150, 10_000])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_as_the_padded_pass(tiny_model, shared_batch, budget, gradient_checkpointing):
    policy = in_float64(tiny_model, gradient_checkpointing=gradient_checkpointing)
    expected = passed(policy, shared_batch, padded(shared_batch))
    parts = cut(shared_batch, budget, packing=ON_CPUS)
    assert parts.packed
    assert_equal(passed(policy, shared_batch, parts.parts), expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_ranks_add_up(policy, shared_batch, ranks):
    expected = passed(policy, shared_batch, padded(shared_batch))
    dealt = deal(shared_batch, 1000, ranks, packing=ON_CPUS)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(shared_batch.sequences))
    shares = []
    for share in dealt:
        mine = cut(select(shared_batch, share), 10_000, packing=ON_CPUS)
        assert mine.packed
        parts = [MicroBatch(share[part.indices], part.packed) for part in mine.parts]
        shares.append(passed(policy, shared_batch, parts))
    together = Passed(
        sum(share.logprobs for share in shares),
        sum(share.entropy for share in shares),
        sum(share.loss for share in shares),
        [torch.stack(gradients).sum(0) for gradients in zip(*(share.gradients for share in shares), strict=True)],
    )
    assert_equal(together, expected)


@pytest.mark.parametrize("family", sorted(SHARING))
def test_families_of_models(family, shared_batch, tmp_path):
    policy = in_float64(save(FAMILIES[family], tmp_path))
    assert bool(policy.packing.pays_below) is SHARING[family]
    if policy.packing.pays_below:
        expected = passed(policy, shared_batch, padded(shared_batch))
        assert_equal(passed(policy, shared_batch, packed(shared_batch)), expected)


def test_a_model_that_is_not_to_share(tiny_model):
    policy = load_policy(
        ModelSpec(path=tiny_model), parameter_dtype="float32", compute_dtype="float32", share_prefixes=False
    )
    assert not policy.packing.pays_below
    assert policy.model.config._attn_implementation == "sdpa"


def test_a_saved_model_does_not_know_of_it(policy, tmp_path):
    policy.model.save_pretrained(tmp_path)
    assert "rlhfless" not in (tmp_path / "config.json").read_text()


def test_bfloat16_is_close(learner, shared_batch):
    with learner(dtype="bfloat16", micro_batch_tokens=1000) as rank:
        assert rank._policy.packing.pays_below
        padded = dataclasses.replace(rank._policy, packing=NEVER)
        shared, alone = (token_logprobs(policy, shared_batch, 1.0, 1000) for policy in (rank._policy, padded))
    difference = shared - alone
    assert 0 < np.abs(difference).mean() < 0.05


# -- attention alone, against a mask of all pairs


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_attention_is_that_of_a_mask(data):
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    stem = generator.integers(0, 9, 60)
    own_from = [data.draw(st.integers(0, length)) for length in lengths]
    rows = [
        np.r_[stem[:at], generator.integers(0, 9, length - at)] for at, length in zip(own_from, lengths, strict=True)
    ]
    packed = whole(rows)
    tensors = [torch.randn(1, 2, len(packed.source), 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    layout = PrefixLayout.of(packed, torch.device("cpu"))
    ours = shared_prefix_attention(torch.nn.Module(), *tensors, None, layout)[0].transpose(1, 2)
    mask = torch.zeros(len(packed.source), len(packed.source), dtype=torch.bool)
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        at = torch.from_numpy(packed.index[start : start + length])
        mask[at[:, None], at] |= torch.ones(length, length, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask)
    weights = torch.randn_like(ours)
    torch.testing.assert_close(ours, expected, atol=EXACT, rtol=0)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=0)


# -- micro-batches


@given(budget=st.integers(1, 700))
@settings(deadline=None)
def test_micro_batches_keep_to_the_budget(shared_batch, budget):
    parts = cut(shared_batch, budget, packing=ON_CPUS)
    assert sorted(np.concatenate([part.indices for part in parts.parts]).tolist()) == answered(shared_batch).tolist()
    if parts.packed:
        sizes = [len(part.packed.source) for part in parts.parts]
        assert all(size <= budget or len(part.indices) == 1 for size, part in zip(sizes, parts.parts, strict=True))
        assert sizes == sorted(sizes, reverse=True)
        assert parts.prompt_tokens < prompt_tokens(shared_batch)
    else:
        assert parts.prompt_tokens == prompt_tokens(shared_batch)


def test_prompt_tokens_by_hand(shared_batch):
    # Four samples of each prompt, of 41, 42, 33, 13 and 14 tokens; one sample of the third has no response.
    assert prompt_tokens(shared_batch) == 4 * (41 + 42 + 33 + 13 + 14) - 33
    # Once: 20 + 10 + 11 + 12 + 13 + 13 + 14; but three times the last 13 of the third prompt, which would save 26.
    assert cut(shared_batch, 10_000, packing=ON_CPUS).prompt_tokens == 20 + 10 + 11 + 12 + 13 + 13 + 14 + 26


def test_short_prompts_do_not_pay(batch):
    assert not cut(batch, 64, packing=ON_CPUS).packed


def test_ranks_get_equal_work(shared_batch):
    dealt = deal(shared_batch, 1000, 2, packing=ON_CPUS)
    row = fed_sequences(shared_batch, 1000, ON_CPUS)
    sizes = [len(row.pack(share).source) for share in dealt]
    assert max(sizes) < 0.65 * sum(sizes)
    assert [share.tolist() for share in deal(shared_batch, 1000, 2, packing=NEVER)] == [
        np.argsort(-shared_batch.lengths, kind="stable")[rank::2].tolist() for rank in range(2)
    ]


def test_the_choice_is_one_of_counts(shared_batch):
    assert not cut(shared_batch, 10_000, packing=Packing(0.01)).packed
    assert not cut(shared_batch, 10_000, packing=NEVER).packed


def test_on_gpus_padding_alone_is_reason_to_pack(policy, batch):
    """Unequal sequences that share nothing: the packed row has no padding, and gives the same."""
    parts = cut(batch, 10_000, packing=ALWAYS)
    assert parts.packed
    assert sum(len(part.packed.source) for part in parts.parts) <= (batch.lengths - 1).sum()
    assert_equal(passed(policy, batch, parts.parts), passed(policy, batch, padded(batch)))
    assert policy.packing == ON_CPUS  # on a CPU


def test_on_gpus_prefixes_are_shared_where_that_pays(policy, shared_batch):
    """Rows are without padding in any case; sharing pays just above where it breaks even."""
    whole_row = fed_sequences(shared_batch, 10_000, ALWAYS).pack(np.arange(shared_batch.sequences))
    alone, computed = int((shared_batch.lengths - 1).sum()), len(whole_row.source)
    breaks_even = JOIN_KEYS * computed * len(whole_row.levels()) / (alone - computed)
    expected = passed(policy, shared_batch, padded(shared_batch))
    for token_keys, shares in ((50.0, False), (1.2 * breaks_even, True)):
        packing = Packing(math.inf, token_keys)
        parts = cut(shared_batch, 10_000, packing=packing)
        assert (parts.packed, parts.shares) == (True, shares)
        assert_equal(passed(policy, shared_batch, parts.parts), expected)
        together = deal(shared_batch, 10_000, 2, packing=packing)
        assert sorted(np.concatenate(together).tolist()) == list(range(shared_batch.sequences))


def test_a_row_with_few_users_of_a_prefix_shares_none():
    """Two sequences share 60 tokens beside 16,000 that do not, which the prefix's kernel would pass, too."""
    stem = np.arange(60)
    rows = [np.r_[stem, 10**6 + np.arange(40)], np.r_[stem, 2 * 10**6 + np.arange(40)]]
    packing = Packing(math.inf, 32_512.0)
    for others, shares in ((0, True), (16, False)):
        prompts = [*rows, *(10**7 * (number + 1) + np.arange(1000) for number in range(others))]
        groups = [
            Group.of(
                Prompt(f"p{number}", tuple(row[:-1].tolist()), ""), [drawn(f"p{number}", 0, row[-1:], np.zeros(1))]
            )
            for number, row in enumerate([np.r_[row, 7] for row in prompts])
        ]
        assert cut(pack(groups), 32_768, packing=packing).shares is shares


def test_unknown_forms_are_refused():
    from rlhfless.functions.prefix_attention import SharingUnsupported

    tensors: Any = [torch.zeros(1, 1, 1, 8)] * 3
    layout = PrefixLayout(1, (), ())
    with pytest.raises(SharingUnsupported, match="sliding_window"):
        shared_prefix_attention(torch.nn.Module(), *tensors, None, layout, sliding_window=4)
