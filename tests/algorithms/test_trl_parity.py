"""The same loss, gradients and weights as TRL's GRPOTrainer over two mini-batches, by TRL's settings that each case
names; and where ours differ on purpose, by how much.

TRL's `_compute_loss` is called unbound, on a stand-in that has the attributes it reads. The policy is a table of
bigram logits that both sides read the logprobs from, so only the losses differ. The second mini-batch is computed
with the weights that the first one left, so its ratios are not 1 and clipping acts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peers import trl_trainer

from fakes.fake_cluster import group as group_of
from rlhfless.algorithms.base import LossInputs, algorithm_of
from rlhfless.algorithms.batch import pack
from rlhfless.algorithms.group_based import group_advantages
from rlhfless.records import Score
from rlhfless.spec import CISPOSpec, DrGRPOSpec, GRPOSpec, GSPOSpec, ImportanceSpec, KLSpec, RLOOSpec, SAPOSpec

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


def entropies_of(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As `logprobs_of`, the entropy of the distribution of each token."""
    logprobs = table.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)[tokens[:, :-1]]


LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
"""TRL's `loss_type` of each aggregation of ours."""


def stand_in(algorithm: GRPOSpec, table: torch.Tensor, **settings) -> SimpleNamespace:
    """What `_compute_loss` reads from its trainer, for losses over a given number of tokens. `settings` override those
    of `algorithm`, in TRL's words."""
    level = settings.get("importance_sampling_level", "token")

    def logprobs_and_entropies(_model, input_ids, *_args, **_kwargs):
        return logprobs_of(table, input_ids), entropies_of(table, input_ids), None

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=logprobs_and_entropies,
        _entropy_bonus_enabled=algorithm.entropy_bonus > 0,
        entropy_coef=algorithm.entropy_bonus,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value, sync_gradients=True
        ),
        args=SimpleNamespace(
            use_bias_correction_kl=settings.get("use_bias_correction_kl", True),
            delta=settings.get("delta"),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        aux_loss_enabled=False,
        beta=algorithm.kl.coefficient,
        current_gradient_accumulation_steps=1,
        epsilon_low=getattr(algorithm, "clip_low", None),
        epsilon_high=settings.get("epsilon_high", getattr(algorithm, "clip_high", None)),
        importance_sampling_level=level,
        loss_type=settings.get("loss_type", LOSS_TYPES[algorithm.aggregation]),
        max_completion_length=algorithm.constant_tokens,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=algorithm.importance is not None,
    )


def trl_run(compute_loss, case: Case, algorithm: GRPOSpec, **settings):
    """Losses, gradients and clip metrics of both mini-batches, by TRL."""
    table = case.start.clone().requires_grad_()
    trainer = stand_in(algorithm, table, **settings)
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


def our_run(case: Case, algorithm: GRPOSpec, of_weight: Callable = lambda weights, _: weights):
    """`of_weight` changes the importance weights, `[rows, width]`, given the mask."""
    table = case.start.clone().requires_grad_()
    results = []
    metrics = []
    for tokens, mask, advantages in zip(case.tokens, case.masks, case.advantages, strict=True):
        old = logprobs_of(case.start, tokens)
        weights = of_weight((old - logprobs_of(case.engine, tokens)).exp(), mask)
        rows = torch.arange(ROWS)[:, None].expand_as(mask)[mask]
        answered, sequence_id = rows.unique(return_inverse=True)
        given = LossInputs(
            logprobs=logprobs_of(table, tokens)[mask],
            entropy=entropies_of(table, tokens)[mask],
            rollout_logprobs=(old - weights.log())[mask],
            advantages=advantages[:, None].expand_as(mask)[mask],
            denominator_tokens=int(mask.sum()),
            sequence_id=sequence_id,
            denominator_sequences=len(answered),
            old_logprobs=old[mask],
            reference_logprobs=logprobs_of(case.reference, tokens)[mask],
        )
        outputs = algorithm_of(algorithm).loss(given)
        (gradient,) = torch.autograd.grad(outputs.loss, table)
        results.append((outputs.loss.detach(), gradient))
        metrics.append(outputs.metrics)
        table.data -= LEARNING_RATE * gradient
    return results, metrics


def assert_same(ours, theirs, factors=(1.0, 1.0)) -> None:
    """Losses and gradients of both mini-batches are `factors` times those of TRL."""
    for (our_loss, our_gradient), (their_loss, their_gradient), factor in zip(ours, theirs, factors, strict=True):
        torch.testing.assert_close(our_loss, factor * their_loss, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(our_gradient, factor * their_gradient, atol=1e-6, rtol=1e-6)
        assert our_gradient.abs().max() > 1e-3, "the case must have a gradient"


def gradient_difference(ours, theirs) -> float:
    return max(float((mine - other).abs().max()) for (_, mine), (_, other) in zip(ours, theirs, strict=True))


KL = {"coefficient": 0.3, "estimator": "k3"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (GRPOSpec(importance=ImportanceSpec(high=1.2)), {}),
        (GRPOSpec(importance=None, clip_low=0.1, clip_high=0.4), {}),
        (GRPOSpec(kl=KLSpec(**KL)), {"use_bias_correction_kl": False}),
        (GRPOSpec(kl=KLSpec(**KL, unbiased=True)), {"use_bias_correction_kl": True}),
        (GRPOSpec(kl=KLSpec(**KL, unbiased=True), aggregation="sequence"), {"use_bias_correction_kl": True}),
        (GRPOSpec(aggregation="sequence"), {}),
        (DrGRPOSpec(constant_tokens=20), {}),
        (GRPOSpec(dual_clip=1.5), {"delta": 1.5}),
        (CISPOSpec(weight_high=1.3), {"loss_type": "cispo", "epsilon_high": 1.3}),
        (SAPOSpec(), {"loss_type": "sapo"}),
    ],
    ids=lambda value: value.type if hasattr(value, "type") else " ".join(map(str, value)),
)
def test_two_mini_batches_as_trl(trl_compute_loss, algorithm, settings, seed):
    case = Case(seed)
    theirs, their_metrics = trl_run(trl_compute_loss, case, algorithm, **settings)
    ours, our_metrics = our_run(case, algorithm)
    assert_same(ours, theirs)
    second = our_metrics[1]
    if algorithm.type == "grpo" and "delta" not in settings:  # with it TRL counts what is left of the ratio
        for name, their_name in (("clipped_low", "clip_ratio/low_mean"), ("clipped_high", "clip_ratio/high_mean")):
            assert [metrics[name].item() for metrics in our_metrics] == pytest.approx(their_metrics[their_name])
    if algorithm.type == "grpo" and algorithm.aggregation == "token":
        assert second["clipped_low"] + second["clipped_high"] > 0, "the case must reach the clip"


@pytest.mark.parametrize("seed", range(2))
def test_trls_default_of_the_kl_is_the_unbiased_one(trl_compute_loss, seed):
    """TRL's default is `use_bias_correction_kl: true`; ours is that of the GRPO paper and verl. Gradients differ even
    where the ratio is 1."""
    config = pytest.importorskip("trl").GRPOConfig
    assert config.__dataclass_fields__["use_bias_correction_kl"].default is True
    assert GRPOSpec().kl.unbiased is False
    theirs, _ = trl_run(trl_compute_loss, Case(seed), GRPOSpec(kl=KLSpec(**KL)))
    ours, _ = our_run(Case(seed), GRPOSpec(kl=KLSpec(**KL)))
    assert (ours[0][1] - theirs[0][1]).abs().max() > 1e-3


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_entropy_bonus_is_a_token_mean_in_every_aggregation(trl_compute_loss, aggregation):
    """TRL: `entropy_coef`, for any `loss_type`. (verl aggregates it like the loss, by `loss_agg_mode`.)"""
    algorithm = GRPOSpec(entropy_bonus=0.4, aggregation=aggregation, constant_tokens=20)
    theirs, _ = trl_run(trl_compute_loss, Case(1), algorithm)
    ours, _ = our_run(Case(1), algorithm)
    assert_same(ours, theirs)
    without, _ = our_run(Case(1), algorithm.model_copy(update={"entropy_bonus": 0.0}))
    tokens, mask = Case(1).tokens[0], Case(1).masks[0]
    mean = entropies_of(Case(1).start, tokens)[mask].mean()
    torch.testing.assert_close(without[0][0] - ours[0][0], 0.4 * mean, atol=1e-6, rtol=1e-6)


GSPO = GSPOSpec(clip_low=0.05, clip_high=0.06, importance=None)
BY_SEQUENCE = {"importance_sampling_level": "sequence"}
WEIGHTED = GSPO.model_copy(update={"importance": ImportanceSpec(high=1.2)})


def test_gspo_is_trls_without_weights(trl_compute_loss):
    """TRL: `importance_sampling_level: sequence`, `loss_type: grpo`, `vllm_importance_sampling_correction: false`."""
    assert_same(our_run(Case(2), GSPO)[0], trl_run(trl_compute_loss, Case(2), GSPO, **BY_SEQUENCE)[0])


def test_gspo_with_token_weights_weighs_each_token_where_trl_weighs_the_response(trl_compute_loss):
    """TRL: `vllm_importance_sampling_mode: token_truncate`. Its loss of a response is one number, times the mean of its
    tokens' weights. Ours (and verl's, see test_peer_parity) weighs the gradient of each token with its own weight."""
    theirs, _ = trl_run(trl_compute_loss, Case(2), WEIGHTED, **BY_SEQUENCE)

    def mean_of_response(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((weights.clamp(max=1.2) * mask).sum(1) / mask.sum(1))[:, None].expand_as(weights)

    assert_same(our_run(Case(2), WEIGHTED, mean_of_response)[0], theirs)
    assert gradient_difference(our_run(Case(2), WEIGHTED)[0], theirs) > 1e-3


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_responses_that_are_cut_off_are_in_no_denominator(trl_compute_loss, aggregation):
    """`mask_truncated`: DAPO takes them out of the mean. TRL (`mask_truncated_completions: true`) takes their tokens
    out of the sum, and with `loss_type: grpo` and `dr_grpo` counts them in the number of responses."""
    algorithm = GRPOSpec(aggregation=aggregation, constant_tokens=20, mask_truncated=True)
    case = Case(3)
    for mask in case.masks:
        mask[1] = mask[4] = False
    ours, _ = our_run(case, algorithm)
    factor = 1.0 if aggregation == "token" else ROWS / (ROWS - 2)
    theirs, _ = trl_run(trl_compute_loss, case, algorithm)
    assert_same(ours[:1], theirs[:1], (factor,))


NONE = float("nan")
"""A reward that failed, as TRL has it."""


@pytest.mark.parametrize(
    "group",
    [
        [1.0, 0.0, 1.0, NONE],
        [1.0, 1.0, 1.0, NONE],
        [0.25, NONE, NONE, 0.5],
        [1.0, NONE, NONE, NONE],
        [0.1, 0.1, 0.1, 0.1],
        [-3.0, 2.0, 0.5, 7.0],
        [1.0, 1.0 + 2**-8, NONE, 1.0],
    ],
    ids=str,
)
def test_a_failed_reward_is_in_no_statistic_of_its_group(group):
    """TRL's GRPOTrainer (std + 1e-4, where ours adds 1e-6) and RLOOTrainer, whose statistics ignore NaN; ours get the
    group without the sample. Where all rewards are equal ours is exactly 0."""
    rewards = torch.tensor(group, dtype=torch.float64)
    known = ~rewards.isnan()
    own, one_group = rewards[known].numpy(), np.zeros(int(known.sum()), np.int64)
    shifted = rewards - rewards.nanmean()
    std = pytest.importorskip("trl.trainer.utils").nanstd(rewards[None], dim=1)
    of_trl = (shifted / (std + 1e-4)).nan_to_num(0.0)
    ours = group_advantages(own, one_group, normalize_std=True)
    scale = float((std + 1e-4) / (std + 1e-6)) if std.isfinite() else 1.0
    np.testing.assert_allclose(ours, of_trl[known].numpy() * scale, atol=1e-6, rtol=1e-6)
    others = ((rewards.nansum() - rewards) / (known.sum() - 1)).numpy()
    of_rloo = (rewards - others).nan_to_num(0.0)[known]
    batch = pack([group_of("p", len(own)).adding(score=[Score(float(one), {}) for one in own])])
    found = algorithm_of(RLOOSpec()).advantages(batch)[batch.starts + 3]
    np.testing.assert_allclose(found, of_rloo.numpy(), atol=1e-6)
