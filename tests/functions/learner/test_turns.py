"""A sample of two turns, with what an environment said between them, through all that the learner does: by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fakes.tiny_learner import token_logprobs
from rlhfless.algorithms.base import LossInputs
from rlhfless.algorithms.batch import Denominators, by_sample, pack, select
from rlhfless.algorithms.group_based import GRPO
from rlhfless.algorithms.passes import mini_batches
from rlhfless.functions.lm_head import OutputHead
from rlhfless.functions.policy import PolicyNetwork, response_logprobs
from rlhfless.records import FinishReason, GivenSegment, Group, Prompt, Rollout, Sample, Score, Source
from rlhfless.spec import GRPOSpec

# P(next | token before it): row 0 is after token 0, and so on.
TABLE = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 2, 1 / 4], [1 / 8, 1 / 8, 3 / 4]])
HALF, QUARTER = np.log(0.5), np.log(0.25)


class OneHot(torch.nn.Module):
    """A decoder whose hidden state is the token itself."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(input_ids, 3).float())


@pytest.fixture
def policy() -> PolicyNetwork:
    head = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(TABLE.log().T)
    model = SimpleNamespace(dtype=torch.float32)
    head_of_it = OutputHead(head, 1.0, None)
    return PolicyNetwork(model, OneHot(), head_of_it, torch.device("cpu"), torch.float32)  # type: ignore[arg-type]


def drawn(index: int, tokens: list[int], logprobs: list[float], prompt_id: str = "a") -> Rollout:
    arrays = np.array(tokens), np.array(logprobs, np.float32)
    return Rollout(prompt_id, index, 0, *arrays, "", FinishReason.STOP, (), "actor", 0.0, 1.0)


def given(source: Source, *tokens: int) -> GivenSegment:
    return GivenSegment(source, np.array(tokens))


@pytest.fixture
def groups() -> list[Group]:
    """Prompt 0. The first sample draws 1 1, the environment says 2 0, it draws 1. The second draws 2 at once."""
    prompt = given(Source.PROMPT, 0)
    turns = (prompt, drawn(0, [1, 1], [-1.0, -2.0]), given(Source.ENVIRONMENT, 2, 0), drawn(0, [1], [-3.0]))
    samples = (
        Sample(turns, Score(1.0, {})),
        Sample((prompt, drawn(1, [2], [-4.0])), Score(0.0, {})),
    )
    other = Group.of(Prompt("b", (1,), ""), [drawn(0, [0], [-5.0], "b")])
    return [other.adding(score=[Score(7.0, {})]), Group(Prompt("a", (0,), ""), samples)]


def test_pack_select_and_mini_batches(groups: list[Group]) -> None:
    assert (groups[1].samples[0].model_tokens, groups[1].samples[0].tokens) == (3, 6)
    batch = pack(groups)
    assert batch.tokens.tolist() == [0, 1, 1, 2, 0, 1, 0, 2, 1, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 0, 1]
    assert batch.sequence_id.tolist() == [0] * 6 + [1, 1, 2, 2]
    assert batch.group_id.tolist() == [0] * 8 + [1, 1]
    assert batch.response_mask.nonzero()[0].tolist() == [1, 2, 5, 7, 9]
    assert batch.rollout_logprobs.tolist() == [0, -1, -2, 0, 0, -3, 0, -4, 0, -5]
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [1, 0, 7]
    assert (batch.lengths.tolist(), batch.response_lengths.tolist()) == ([6, 2, 2], [3, 1, 1])
    assert batch.denominators == Denominators(tokens=5, sequences=3, groups=2)
    chosen = select(batch, np.array([1, 0]))
    assert chosen.tokens.tolist() == [0, 2, 0, 1, 1, 2, 0, 1]
    assert chosen.response_mask.nonzero()[0].tolist() == [1, 3, 4, 7]
    assert chosen.rollout_logprobs.tolist() == [0, -4, 0, -1, -2, 0, 0, -3]
    first, second = mini_batches(batch, 2, np.arange(batch.groups))
    assert (first.denominators, second.denominators) == (Denominators(4, 2, 1), Denominators(1, 1, 1))
    assert first.response_mask.nonzero()[0].tolist() == [1, 2, 5, 7]


def test_reference_logprobs_go_to_the_tokens_that_were_drawn(groups: list[Group], policy: PolicyNetwork) -> None:
    batch = pack(groups)
    values = token_logprobs(policy, batch, 1.0, micro_batch_tokens=4)
    np.testing.assert_allclose(values, [0, QUARTER, HALF, 0, 0, QUARTER, 0, QUARTER, 0, QUARTER], rtol=1e-6)
    of_groups = by_sample(batch, values, groups)
    (other,), (turns, single) = of_groups
    np.testing.assert_allclose(turns, [QUARTER, HALF, QUARTER], rtol=1e-6)
    np.testing.assert_allclose([*single, *other], [QUARTER, QUARTER], rtol=1e-6)
    added = [group.adding(reference_logprobs=each) for group, each in zip(groups, of_groups, strict=True)]
    again = pack(added).reference_logprobs
    assert again is not None
    assert again.tolist() == values.tolist()


def test_nothing_is_learned_about_what_the_environment_said(groups: list[Group], policy: PolicyNetwork) -> None:
    batch = pack(groups[1:])
    algorithm = GRPO(GRPOSpec(normalize_std=False, importance=None))
    batch = batch.with_columns(advantages=algorithm.advantages(batch))
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0, 0, 0.5, 0, -0.5]  # rewards 1 and 0, mean 0.5
    current = response_logprobs(policy, batch, 1.0)
    np.testing.assert_allclose(current.logprobs.detach(), [QUARTER, HALF, QUARTER, QUARTER], rtol=1e-6)
    mask = batch.response_mask
    inputs = LossInputs(
        logprobs=current.logprobs,
        entropy=current.entropy,
        rollout_logprobs=torch.from_numpy(batch.rollout_logprobs[mask]),
        advantages=torch.from_numpy(batch.advantages[mask]),
        denominator_tokens=batch.denominators.tokens,
        sequence_id=torch.from_numpy(batch.sequence_id[mask]),
        denominator_sequences=batch.denominators.sequences,
    )
    loss = algorithm.loss(inputs).loss
    assert loss.item() == pytest.approx(-(3 * 0.5 - 0.5) / 4)
    loss.backward()
    # A drawn token adds -A / 4 x (one-hot of it - P) to the row after which it was drawn. After 1: 1 (A = 1/2); that 2
    # followed it, too, was the environment's doing. After 0: 1 twice (1/2), and 2 (-1/2). After 2: nothing.
    after_0 = -1 / 4 * np.array([-1 / 2, 3 / 4, -1 / 4]) + 1 / 8 * np.array([-1 / 2, -1 / 4, 3 / 4])
    after_1 = -1 / 8 * np.array([-1 / 4, 1 / 2, -1 / 4])
    gradient = policy.head.linear.weight.grad
    assert gradient is not None
    np.testing.assert_allclose(gradient.T, [after_0, after_1, [0, 0, 0]], atol=1e-7)
