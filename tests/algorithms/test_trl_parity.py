"""The same loss, gradients and weights as TRL's GRPOTrainer over two mini-batches.

TRL's `_compute_loss` is called unbound, on a stand-in that has the attributes it reads. The policy is a table of
bigram logits that both sides read the logprobs from, so only the losses differ. The second mini-batch is computed
with the weights that the first one left, so its ratios are not 1 and clipping acts.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from fakes.trl_trainers import trl_trainer
from rlhfless.algorithms.base import LossInputs
from rlhfless.algorithms.grpo import GRPO
from rlhfless.spec import GRPOSpec, ImportanceSpec, KLSpec

VOCABULARY = 7
ROWS = 6
WIDTH = 9
LEARNING_RATE = 16.0  # large, so that the second mini-batch meets the clip


@pytest.fixture(scope="module")
def trl_compute_loss():
    return trl_trainer("grpo_trainer").GRPOTrainer._compute_loss


def logprobs_of(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, width + 1] tokens -> [rows, width]: each token after the first, given the one before it."""
    return table.log_softmax(-1)[tokens[:, :-1], tokens[:, 1:]]


class Case:
    """Two padded mini-batches, a start policy, an engine that is a little off, and a reference."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator)

        self.start = draw(VOCABULARY, VOCABULARY)
        self.engine = self.start + 0.4 * draw(VOCABULARY, VOCABULARY)
        self.reference = self.start + 0.5 * draw(VOCABULARY, VOCABULARY)
        self.tokens = [torch.randint(VOCABULARY, (ROWS, WIDTH + 1), generator=generator) for _ in range(2)]
        lengths = [torch.randint(1, WIDTH + 1, (ROWS,), generator=generator) for _ in range(2)]
        self.masks = [torch.arange(WIDTH)[None] < length[:, None] for length in lengths]
        self.advantages = [draw(ROWS) for _ in range(2)]


def stand_in(algorithm: GRPOSpec, table: torch.Tensor) -> SimpleNamespace:
    """All that `_compute_loss` reads of its trainer, for the token-mean loss over a given number of tokens."""

    def logprobs_and_entropies(_model, input_ids, *_args, **_kwargs):
        logprobs = logprobs_of(table, input_ids)
        return logprobs, torch.zeros_like(logprobs), None

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=logprobs_and_entropies,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value, sync_gradients=True
        ),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=algorithm.kl.coefficient,
        current_gradient_accumulation_steps=1,
        epsilon_low=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        importance_sampling_level="token",
        loss_type="dapo",
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=algorithm.importance is not None,
    )


def trl_run(compute_loss, case: Case, algorithm: GRPOSpec):
    """Losses, gradients and clip metrics of both mini-batches, by TRL."""
    table = case.start.clone().requires_grad_()
    trainer = stand_in(algorithm, table)
    results = []
    for tokens, mask, advantages in zip(case.tokens, case.masks, case.advantages, strict=True):
        old = logprobs_of(case.start, tokens)
        weight = (old - logprobs_of(case.engine, tokens)).exp()
        given = {
            "prompt_ids": tokens[:, :1],
            "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
            "completion_ids": tokens[:, 1:],
            "completion_mask": mask.long(),
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": logprobs_of(case.reference, tokens),
            "importance_sampling_ratio": weight.clamp(
                max=algorithm.importance.high if algorithm.importance else torch.inf
            ),  # its mode "token_truncate"
            "num_items_in_batch": mask.sum(),
        }
        loss = compute_loss(trainer, None, given)
        (gradient,) = torch.autograd.grad(loss, table)
        results.append((loss.detach(), gradient))
        table.data -= LEARNING_RATE * gradient
    return results, trainer._metrics["train"]


def our_run(case: Case, algorithm: GRPOSpec):
    table = case.start.clone().requires_grad_()
    results = []
    metrics = []
    for tokens, mask, advantages in zip(case.tokens, case.masks, case.advantages, strict=True):
        given = LossInputs(
            logprobs=logprobs_of(table, tokens)[mask],
            entropy=torch.zeros(int(mask.sum())),
            rollout_logprobs=logprobs_of(case.engine, tokens)[mask],
            advantages=advantages[:, None].expand_as(mask)[mask],
            denominator_tokens=int(mask.sum()),
            sequence_id=torch.arange(ROWS)[:, None].expand_as(mask)[mask],
            denominator_sequences=ROWS,
            old_logprobs=logprobs_of(case.start, tokens)[mask],
            reference_logprobs=logprobs_of(case.reference, tokens)[mask],
        )
        outputs = GRPO(algorithm).loss(given)
        (gradient,) = torch.autograd.grad(outputs.loss, table)
        results.append((outputs.loss.detach(), gradient))
        metrics.append(outputs.metrics)
        table.data -= LEARNING_RATE * gradient
    return results, metrics


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "algorithm",
    [
        GRPOSpec(importance=ImportanceSpec(high=1.2)),
        GRPOSpec(importance=None, clip_low=0.1, clip_high=0.4),
        GRPOSpec(kl=KLSpec(coefficient=0.3, estimator="k3")),
    ],
    ids=["importance", "clip", "kl"],
)
def test_two_mini_batches_as_trl(trl_compute_loss, algorithm, seed):
    case = Case(seed)
    theirs, their_metrics = trl_run(trl_compute_loss, case, algorithm)
    ours, our_metrics = our_run(case, algorithm)
    for (their_loss, their_gradient), (our_loss, our_gradient) in zip(theirs, ours, strict=True):
        torch.testing.assert_close(our_loss, their_loss, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(our_gradient, their_gradient, atol=1e-6, rtol=1e-6)
    for name, their_name in (("clipped_low", "clip_ratio/low_mean"), ("clipped_high", "clip_ratio/high_mean")):
        assert [metrics[name].item() for metrics in our_metrics] == pytest.approx(their_metrics[their_name])
    second = our_metrics[1]
    assert second["clipped_low"] + second["clipped_high"] > 0, "the case must reach the clip"
