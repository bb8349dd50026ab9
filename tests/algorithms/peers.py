"""The published formulas of verl's `core_algos` (commit b178a3c), reimplemented one number at a time.

A row is a sequence; its lists have one entry per generated token. A mask with holes is a list of flags next to a longer
list. Only the names of settings are shared with the package. TRL is compared by its own trainers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

Scalar = torch.Tensor


@dataclass(frozen=True)
class Row:
    """The generated tokens of a sequence."""

    current: list[Scalar]
    old: list[float]
    rollout: list[float]
    reference: list[float]
    advantage: list[float]


# -- advantages, of [sequence][position] with flags for the generated tokens


def gae_with_mask(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float, lambda_: float
) -> tuple[list[float], list[float]]:
    """compute_gae_advantage_return, before whitening: advantages and returns, of use where `mask` is set."""
    advantages = [0.0] * len(mask)
    next_value = running = 0.0
    for at in range(len(mask) - 1, -1, -1):
        if mask[at]:  # elsewhere both are carried through
            running = rewards[at] + gamma * next_value - values[at] + gamma * lambda_ * running
            next_value = values[at]
        advantages[at] = running
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def whitened(numbers: Sequence[float]) -> list[float]:
    """masked_whiten over the generated tokens of all sequences."""
    mean = sum(numbers) / len(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return [(number - mean) / math.sqrt(variance + 1e-8) for number in numbers]


def by_group(rewards: Sequence[float], groups: Sequence[int], of_group: Callable[[float, list[float]], float]) -> list:
    """`of_group(reward, rewards of its group)` for each sequence."""
    return [
        of_group(reward, [other for other, its in zip(rewards, groups, strict=True) if its == group])
        for reward, group in zip(rewards, groups, strict=True)
    ]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def grpo(reward: float, group: list[float]) -> float:
    """compute_grpo_outcome_advantage, of a group of two or more."""
    std = math.sqrt(sum((other - mean(group)) ** 2 for other in group) / (len(group) - 1))
    return (reward - mean(group)) / (std + 1e-6)


def rloo(reward: float, group: list[float]) -> float:
    """compute_rloo_outcome_advantage, of a group of two or more: the mean of the others, written out."""
    return reward - (sum(group) - reward) / (len(group) - 1)


# -- losses


def ratio(row: Row, at: int) -> Scalar:
    return (row.current[at] - row.old[at]).clamp(-20, 20).exp()


def clip(value: Scalar, advantage: float, low: float, high: float, dual: float | None = None) -> Scalar:
    """compute_policy_loss_vanilla; the dual clip acts on negative advantages."""
    loss = torch.maximum(-advantage * value, -advantage * value.clamp(1 - low, 1 + high))
    return torch.minimum(loss, torch.tensor(-advantage * dual)) if dual is not None and advantage < 0 else loss


def vanilla(row: Row, settings) -> list[Scalar]:
    return [
        clip(ratio(row, at), row.advantage[at], settings.clip_low, settings.clip_high, settings.dual_clip)
        for at in range(len(row.old))
    ]


def gspo(row: Row, settings) -> list[Scalar]:
    """compute_policy_loss_gspo."""
    of_sequence = mean([float(current.detach()) - old for current, old in zip(row.current, row.old, strict=True)])
    ratios = [(of_sequence + current - current.detach()).exp() for current in row.current]
    return [
        clip(value, advantage, settings.clip_low, settings.clip_high)
        for value, advantage in zip(ratios, row.advantage, strict=True)
    ]


def cispo(row: Row, settings) -> list[Scalar]:
    """compute_policy_loss_cispo, whose bounds are 1 - clip_ratio_low and 1 + clip_ratio_high."""
    return [
        -float(ratio(row, at).detach().clamp(settings.weight_low, settings.weight_high))
        * row.advantage[at]
        * row.current[at]
        for at in range(len(row.old))
    ]


def sapo(row: Row, settings) -> list[Scalar]:
    """compute_policy_loss_sapo: tau_pos where the advantage is above 0, else tau_neg."""

    def one(at: int) -> Scalar:
        advantage = row.advantage[at]
        tau = settings.temperature_positive if advantage > 0 else settings.temperature_negative
        return -advantage * 4 / tau / (1 + (-tau * (ratio(row, at) - 1)).exp())

    return [one(at) for at in range(len(row.old))]


def k3(row: Row) -> list[Scalar]:
    """kl_penalty("low_var_kl"), where its clamps do not act."""
    return [
        (reference - current).exp() - (reference - current) - 1
        for current, reference in zip(row.current, row.reference, strict=True)
    ]


def unbiased_k3(row: Row) -> list[Scalar]:
    """DeepSeek-V3.2 (arXiv 2512.02556): k3, times the ratio of the current to the old policy."""
    return [ratio(row, at) * value for at, value in enumerate(k3(row))]


# -- corrections


def weights(row: Row, level: str) -> list[float]:
    """The ratios of old policy to engine, as rollout_corr_helper has them at each level."""
    logs = [old - rollout for old, rollout in zip(row.old, row.rollout, strict=True)]
    of_level = {"token": logs, "sequence": [sum(logs)] * len(logs), "geometric": [mean(logs)] * len(logs)}[level]
    return [math.exp(log) for log in of_level]


def corrected(row: Row, values: list[Scalar], settings) -> list[Scalar]:
    """Truncated or masked (IcePop) weights, and rejection."""
    if settings.importance is not None:
        low, high = settings.importance.low, settings.importance.high
        factors = [
            (
                min(max(weight, low), high)
                if settings.importance.outside == "truncate"
                else weight * (low <= weight <= high)
            )
            for weight in weights(row, settings.importance.level)
        ]
        values = [value * factor for value, factor in zip(values, factors, strict=True)]
    if settings.rejection is not None:
        kept = [
            settings.rejection.low <= each <= settings.rejection.high for each in weights(row, settings.rejection.level)
        ]
        values = [value * keep for value, keep in zip(values, kept, strict=True)]
    return values


def kept_by_k1(row: Row, option: str, lower: float, upper: float) -> list[bool]:
    """compute_rollout_rejection_mask of verl's rollout_corr_helper: log(lower) <= k1 <= log(upper), where k1 is the
    log ratio of the engine's to the learner's probability."""
    k1 = [rollout - old for old, rollout in zip(row.old, row.rollout, strict=True)]
    of_option = {
        "token_k1": k1,
        "seq_sum_k1": [sum(k1)] * len(k1),
        "seq_mean_k1": [mean(k1)] * len(k1),
    }[option]
    return [math.log(lower) <= value <= math.log(upper) for value in of_option]


# -- aggregation


def aggregated(of_rows: list[list[Scalar]], settings) -> Scalar:
    """agg_loss: token-mean, seq-mean-token-mean; and Dr. GRPO's constant, over sequences, as TRL's `dr_grpo`."""
    sums = [torch.stack(row).sum() for row in of_rows]
    match settings.aggregation:
        case "token":
            return torch.stack(sums).sum() / sum(len(row) for row in of_rows)
        case "sequence":
            return torch.stack([total / len(row) for total, row in zip(sums, of_rows, strict=True)]).mean()
        case _:
            return torch.stack(sums).sum() / (len(of_rows) * settings.constant_tokens)


def value_loss(values: list[Scalar], old: list[float], returns: list[float], clip_range: float) -> Scalar:
    """compute_value_loss, token mean."""
    losses = [
        torch.maximum((value - target) ** 2, (value.clamp(before - clip_range, before + clip_range) - target) ** 2)
        for value, before, target in zip(values, old, returns, strict=True)
    ]
    return 0.5 * torch.stack(losses).mean()


def trl_trainer(name: str) -> ModuleType:
    """Return the module `trl.trainer.NAME`, imported without vLLM, which takes seconds and is needed by no loss."""
    utilities = pytest.importorskip("trl.import_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "is_vllm_available", lambda *_, **__: False)
        module: ModuleType = pytest.importorskip(f"trl.trainer.{name}")
    return module
