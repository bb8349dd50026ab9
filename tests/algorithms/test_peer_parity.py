"""Losses, gradients, advantages and returns equal those of verl's `core_algos` to 1e-6 (see peers.py).

The cases have masks with holes (an environment's tokens), groups of different sizes and two mini-batches, between which
the policy moves. Ours are computed in micro-batches of whole sequences and added up. The last tests show where ours
differ, and why.
"""

from __future__ import annotations

import numpy as np
import peers
import pytest
import torch

from rlhfless.algorithms.base import LossInputs, ValueInputs, algorithm_of, combine_metrics
from rlhfless.algorithms.batch import Denominators, PackedBatch, select
from rlhfless.algorithms.losses import correction
from rlhfless.algorithms.passes import mini_batches
from rlhfless.spec import (
    CISPOSpec,
    DrGRPOSpec,
    GRPOSpec,
    GSPOSpec,
    ImportanceSpec,
    KLSpec,
    PPOSpec,
    ReinforcePlusPlusSpec,
    RejectionSpec,
    RewardKLSpec,
    RLOOSpec,
    SAPOSpec,
)

VOCABULARY = 7
SIZES = (3, 2, 4, 2, 5)
"""Samples of each group."""
EXACT = {"atol": 1e-6, "rtol": 1e-6}


class Case:
    """A batch, and bigram tables as the policies that generated and scored it, all in float64."""

    def __init__(self, seed: int, *, sizes: tuple[int, ...] = SIZES, holes: bool = True) -> None:
        numbers = np.random.default_rng(seed)
        self.start = torch.from_numpy(numbers.standard_normal((VOCABULARY, VOCABULARY)))
        self.engine = self.start + 0.3 * torch.from_numpy(numbers.standard_normal((VOCABULARY, VOCABULARY)))
        self.reference = self.start + 0.4 * torch.from_numpy(numbers.standard_normal((VOCABULARY, VOCABULARY)))
        self.moved = 0.5 * torch.from_numpy(numbers.standard_normal((VOCABULARY, VOCABULARY)))
        lengths = numbers.integers(3, 12, sum(sizes))
        positions = np.concatenate([np.arange(length) for length in lengths])
        mask = positions > 0
        if holes:
            # The second token is always drawn, so that every sequence has one.
            mask &= (positions == 1) | (numbers.random(len(positions)) < 0.7)
        self.tokens = numbers.integers(0, VOCABULARY, len(positions))
        self.batch = PackedBatch(
            tokens=self.tokens,
            positions=positions,
            sequence_id=np.repeat(np.arange(len(lengths)), lengths),
            group_id=np.repeat(np.repeat(np.arange(len(sizes)), sizes), lengths),
            response_mask=mask,
            denominators=Denominators(int(mask.sum()), len(lengths), len(sizes)),
            rollout_logprobs=np.zeros(len(positions), np.float32),
        )
        columns = {
            "rollout_logprobs": self.logprobs(self.engine, self.batch),
            "old_logprobs": self.logprobs(self.start, self.batch),
            "reference_logprobs": self.logprobs(self.reference, self.batch),
            "values": torch.from_numpy(numbers.standard_normal(len(positions))),
        }
        rewards = numbers.integers(0, 4, sum(sizes)) / 2
        self.batch = self.batch.with_columns(
            rewards=rewards, **{name: values.numpy() for name, values in columns.items()}
        )

    @staticmethod
    def logprobs(table: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return logprobs `[tokens]`; ignore those of first tokens."""
        before = np.roll(batch.tokens, 1)
        return table.log_softmax(-1)[before, batch.tokens]


def drawn(batch: PackedBatch, values) -> list[list[float]]:
    """Split the values of generated tokens by sequence."""
    of_sequences = np.split(np.asarray(values)[batch.response_mask], np.cumsum(batch.response_lengths)[:-1])
    return [of_sequence.tolist() for of_sequence in of_sequences]


def our_loss(algorithm, table: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Add losses and metrics over micro-batches of three sequences."""
    outputs = []
    for first in range(0, batch.sequences, 3):
        part = select(batch, np.arange(first, min(first + 3, batch.sequences)))
        mask = part.response_mask
        columns = {
            name: torch.from_numpy(part.columns()[name][mask])
            for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages")
        }
        everything = table.log_softmax(-1)[np.roll(part.tokens, 1)[mask]]
        inputs = LossInputs(
            logprobs=Case.logprobs(table, part)[mask],
            entropy=-(everything.exp() * everything).sum(-1),
            denominator_tokens=part.denominators.tokens,
            sequence_id=torch.from_numpy(part.sequence_id[mask]),
            denominator_sequences=part.denominators.sequences,
            **columns,
        )
        outputs.append(algorithm.loss(inputs))
    return sum(part.loss for part in outputs), combine_metrics(part.metrics for part in outputs)


def peer_loss(loss, settings, table: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Compute the loss of the mini-batch one token at a time."""
    current = Case.logprobs(table, batch)
    columns = ("old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages")
    rows = [
        peers.Row(list(current[torch.from_numpy(batch.response_mask & (batch.sequence_id == index))]), *of_row)
        for index, of_row in enumerate(zip(*(drawn(batch, batch.columns()[name]) for name in columns), strict=True))
    ]
    total = peers.aggregated([peers.corrected(row, loss(row, settings), settings) for row in rows], settings)
    if settings.kl.on and settings.kl.where == "loss":
        kl = peers.unbiased_k3 if settings.kl.unbiased else peers.k3
        total = total + settings.kl.coefficient * peers.aggregated([kl(row) for row in rows], settings)
    return total


NO_CORRECTION = {"importance": None}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (peers.vanilla, PPOSpec(dual_clip=1.4, **NO_CORRECTION)),
        (peers.vanilla, GRPOSpec(aggregation="sequence", kl=KLSpec(coefficient=0.3), **NO_CORRECTION)),
        (peers.vanilla, GRPOSpec(kl=KLSpec(coefficient=0.3))),
        (peers.vanilla, GRPOSpec(kl=KLSpec(coefficient=0.3, unbiased=True), **NO_CORRECTION)),
        (peers.gspo, GSPOSpec(clip_low=0.02, clip_high=0.03, kl=KLSpec(coefficient=0.3, unbiased=True))),
        (peers.vanilla, DrGRPOSpec(constant_tokens=20, **NO_CORRECTION)),
        (peers.vanilla, RLOOSpec(clip_low=0.1, clip_high=0.3, **NO_CORRECTION)),
        (peers.vanilla, ReinforcePlusPlusSpec(**NO_CORRECTION)),
        (peers.gspo, GSPOSpec(clip_low=0.02, clip_high=0.03, **NO_CORRECTION)),
        (peers.cispo, CISPOSpec(weight_low=0.8, weight_high=1.2, **NO_CORRECTION)),
        (peers.sapo, SAPOSpec(**NO_CORRECTION)),
        (peers.vanilla, GRPOSpec(importance=ImportanceSpec(high=1.1))),
        (peers.vanilla, GRPOSpec(importance=ImportanceSpec(level="sequence", low=0.5, high=1.5))),
        (peers.vanilla, GRPOSpec(importance=ImportanceSpec(level="geometric", low=0.95, high=1.05))),
        (peers.vanilla, GRPOSpec(importance=ImportanceSpec(low=0.8, high=1.3, outside="mask"))),
        (peers.gspo, GSPOSpec(importance=ImportanceSpec(level="sequence", low=0.5, high=2, outside="mask"))),
        (peers.vanilla, GRPOSpec(rejection=RejectionSpec(level="token", low=0.8, high=1.2))),
        (peers.vanilla, GRPOSpec(rejection=RejectionSpec(level="sequence", low=0.6, high=1.7), **NO_CORRECTION)),
        (peers.sapo, SAPOSpec(rejection=RejectionSpec(low=0.9, high=1.1))),
    ],
    ids=lambda value: value.type if hasattr(value, "type") else value.__name__,
)
def test_losses_and_gradients_over_two_mini_batches(loss, settings, seed):
    case, algorithm = Case(seed), algorithm_of(settings)
    batch = case.batch.with_columns(advantages=algorithm.advantages(case.batch))
    table = case.start.clone().requires_grad_()
    for number, part in enumerate(mini_batches(batch, 2, np.arange(batch.groups))):
        (ours, metrics), theirs = our_loss(algorithm, table, part), peer_loss(loss, settings, table, part)
        torch.testing.assert_close(ours, theirs, **EXACT)
        (gradient,), (expected,) = torch.autograd.grad(ours, table), torch.autograd.grad(theirs, table)
        torch.testing.assert_close(gradient, expected, **EXACT)
        assert expected.abs().max() > 1e-4, "the case must have a gradient"
        if number == 0:
            # So far, and not only down the gradient, that the second mini-batch meets the clip on both sides of it.
            table.data += case.moved - 0.1 * expected
    for bounds in (("clipped_low", "clipped_high"), ("bounded_low", "bounded_high"), ("rejected",)):
        assert not metrics.keys() >= {*bounds} or 0 < sum(metrics[name] for name in bounds) < 1, metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("coefficient", [0.0, 0.2])
def test_generalised_advantages_and_returns(seed, coefficient):
    batch = Case(seed).batch
    kl = RewardKLSpec(coefficient=coefficient)
    algorithm = algorithm_of(PPOSpec(gamma=0.97, lambda_actor=0.9, lambda_critic=0.8, kl=kl))
    advantages, returns = [], []
    for index in range(batch.sequences):
        mine = batch.sequence_id == index
        mask = batch.response_mask[mine]
        rewards = -coefficient * (batch.old_logprobs - batch.reference_logprobs)[mine].astype(np.float64)
        rewards[np.flatnonzero(mask)[-1]] += batch.rewards[index]
        of_actor, _ = peers.gae_with_mask(rewards, batch.values[mine], mask, 0.97, 0.9)
        _, of_critic = peers.gae_with_mask(rewards, batch.values[mine], mask, 0.97, 0.8)
        advantages += [value for value, flag in zip(of_actor, mask, strict=True) if flag]
        returns += [value for value, flag in zip(of_critic, mask, strict=True) if flag]
    np.testing.assert_allclose(algorithm.advantages(batch)[batch.response_mask], peers.whitened(advantages), **EXACT)
    np.testing.assert_allclose(algorithm.returns(batch)[batch.response_mask], returns, **EXACT)
    assert not algorithm.advantages(batch)[~batch.response_mask].any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("settings", "of_group"),
    [
        (GRPOSpec(), peers.grpo),
        (DrGRPOSpec(), lambda reward, group: reward - peers.mean(group)),
        (RLOOSpec(), peers.rloo),
    ],
    ids=["grpo", "dr_grpo", "rloo"],
)
def test_advantages_by_group(settings, of_group, seed):
    batch = Case(seed).batch
    expected = peers.by_group(batch.rewards.tolist(), batch.sequence_groups.tolist(), of_group)
    ours = algorithm_of(settings).advantages(batch)
    for of_sequence, advantage in zip(drawn(batch, ours), expected, strict=True):
        np.testing.assert_allclose(of_sequence, advantage, **EXACT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_plus_plus(group_baseline, seed):
    """verl's returns end at a masked token, so the responses have no holes; with a baseline it does not discount."""
    batch, gamma = Case(seed, holes=False).batch, 1.0 if group_baseline else 0.9
    settings = ReinforcePlusPlusSpec(gamma=gamma, group_baseline=group_baseline)
    rewards = batch.rewards.tolist()
    if group_baseline:
        rewards = peers.by_group(rewards, batch.sequence_groups.tolist(), lambda one, group: one - peers.mean(group))
    returns = [
        reward * gamma ** (length - 1 - at)
        for reward, length in zip(rewards, batch.response_lengths.tolist(), strict=True)
        for at in range(length)
    ]
    ours = algorithm_of(settings).advantages(batch)[batch.response_mask]
    np.testing.assert_allclose(ours, peers.whitened(returns), **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_values_and_its_gradient(seed):
    numbers = np.random.default_rng(seed)
    old, returns = numbers.standard_normal((2, 30))
    current = torch.from_numpy(old + numbers.standard_normal(30)).requires_grad_()
    algorithm = algorithm_of(PPOSpec(value_clip=0.5))
    ours = sum(
        algorithm.value_loss(
            ValueInputs(current[part], torch.from_numpy(old)[part], torch.from_numpy(returns)[part], 30)
        ).loss
        for part in (slice(0, 7), slice(7, 7), slice(7, 30))
    )
    theirs = peers.value_loss(list(current), old.tolist(), returns.tolist(), 0.5)
    torch.testing.assert_close(ours, theirs, **EXACT)
    (gradient,), (expected,) = torch.autograd.grad(ours, current), torch.autograd.grad(theirs, current)
    torch.testing.assert_close(gradient, expected, **EXACT)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_entropy_bonus_is_the_mean_over_tokens(aggregation):
    """TRL's `entropy_coef`. verl's `entropy_coeff` is aggregated like the loss, which is the same only for
    `token-mean`."""
    case = Case(0)
    batch = case.batch.with_columns(advantages=np.zeros(len(case.tokens), np.float32))
    table = case.start.clone().requires_grad_()
    settings = GRPOSpec(entropy_bonus=0.5, aggregation=aggregation, constant_tokens=20)
    ours, _ = our_loss(algorithm_of(settings), table, batch)
    logprobs = table.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    before = np.roll(batch.tokens, 1).astype(np.float64)
    rows = [[entropies[int(token)] for token in of_row] for of_row in drawn(batch, before)]
    mean = torch.stack([value for row in rows for value in row]).mean()
    torch.testing.assert_close(ours, -0.5 * mean, **EXACT)
    (gradient,), (expected,) = torch.autograd.grad(ours, table), torch.autograd.grad(-0.5 * mean, table)
    torch.testing.assert_close(gradient, expected, **EXACT)
    of_verl = peers.aggregated(rows, settings)
    assert torch.isclose(of_verl, mean, atol=1e-6) == (aggregation == "token")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [GRPOSpec(), RLOOSpec(), DrGRPOSpec()], ids=lambda settings: settings.type)
def test_kl_in_the_reward_of_a_response(settings, seed):
    """TRL's RLOOTrainer (`beta`) and verl (`use_kl_in_reward: true`, `kl_penalty: kl`): the sum over the response of
    the learner's old logprobs minus the reference's, before the statistics of the group."""
    batch = Case(seed).batch
    settings = settings.model_copy(update={"kl": KLSpec(coefficient=0.2, estimator="k1", where="reward")})
    kl = drawn(batch, batch.old_logprobs.astype(np.float64) - batch.reference_logprobs)
    rewards = [reward - 0.2 * sum(row) for reward, row in zip(batch.rewards.tolist(), kl, strict=True)]
    by_type = {"grpo": peers.grpo, "rloo": peers.rloo, "dr_grpo": lambda one, group: one - peers.mean(group)}
    expected = peers.by_group(rewards, batch.sequence_groups.tolist(), by_type[settings.type])
    for of_sequence, advantage in zip(drawn(batch, algorithm_of(settings).advantages(batch)), expected, strict=True):
        np.testing.assert_allclose(of_sequence, advantage, **EXACT)


# -- where ours differ


@pytest.mark.parametrize("settings", [GRPOSpec(), RLOOSpec(), DrGRPOSpec()])
def test_a_sample_that_is_alone_in_its_group_gives_no_signal(settings):
    """verl gives it its whole reward as the advantage (mean 0, std 1), without a baseline. It is alone because a reward
    failed for the others, and learning from it would reinforce any response."""
    batch = Case(0, sizes=(3, 1)).batch.with_columns(rewards=np.array([0.0, 1, 1, 5]))
    assert not any(drawn(batch, algorithm_of(settings).advantages(batch))[3])


def test_a_return_is_carried_through_an_environments_tokens():
    """verl's REINFORCE++ resets the return at each masked token, so turns before the last get none of the reward. Its
    GAE carries it through; we do so in both."""
    batch = Case(0, sizes=(2,)).batch.with_columns(rewards=np.array([1.0, 0.0]))
    first, second = drawn(batch, algorithm_of(ReinforcePlusPlusSpec()).advantages(batch))
    assert len({*first}) == len({*second}) == 1
    assert first[0] > 0 > second[0]


def test_a_token_far_from_its_reference_keeps_its_kl():
    """verl clamps k3 at 10, which removes the gradient of the furthest token. We clamp only |x|, at 20."""
    current = torch.tensor([-6.0], requires_grad=True)
    inputs = LossInputs(
        logprobs=current,
        entropy=torch.zeros(1),
        rollout_logprobs=torch.tensor([-6.0]),
        advantages=torch.zeros(1),
        denominator_tokens=1,
        sequence_id=torch.zeros(1, dtype=torch.int64),
        denominator_sequences=1,
        reference_logprobs=torch.tensor([-1.0]),
    )
    loss = algorithm_of(GRPOSpec(kl=KLSpec(coefficient=1.0))).loss(inputs).loss
    assert loss.item() == pytest.approx(np.exp(5) - 6, rel=1e-6)
    loss.backward()
    assert current.grad.item() == pytest.approx(1 - np.exp(5), rel=1e-6)


def test_rejected_tokens_stay_in_the_denominator():
    """verl removes rejected tokens from the mask, so the rest weigh more the more are rejected. Our denominators are
    known before any ratio is, and a step with half of its tokens rejected is half a step. (verl also bounds the inverse
    ratio; for bounds like 0.99 and 1.01 that is nearly the same.)"""
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -1.0]),
        entropy=torch.zeros(2),
        rollout_logprobs=torch.tensor([-1.0, -3.0]),
        advantages=torch.tensor([1.0, 1.0]),
        denominator_tokens=2,
        sequence_id=torch.tensor([0, 1]),
        denominator_sequences=2,
    )
    outputs = algorithm_of(GRPOSpec(rejection=RejectionSpec())).loss(inputs)
    assert outputs.loss.item() == -0.5
    assert outputs.metrics["rejected"].item() == 0.5


def test_dr_grpo_divides_by_the_number_of_responses():
    """As the paper and TRL (`loss_type: dr_grpo`); verl's `seq-mean-token-sum-norm` does not."""
    case, settings = Case(1), DrGRPOSpec(constant_tokens=20, **NO_CORRECTION)
    batch = case.batch.with_columns(advantages=algorithm_of(settings).advantages(case.batch))
    ours, _ = our_loss(algorithm_of(settings), case.engine, batch)
    current = Case.logprobs(case.engine, batch)
    of_verl = 0.0
    for index, (old, advantage) in enumerate(
        zip(drawn(batch, batch.old_logprobs), drawn(batch, batch.advantages), strict=True)
    ):
        own = current[torch.from_numpy(batch.response_mask & (batch.sequence_id == index))]
        row = peers.Row(list(own), old, old, old, advantage)
        of_verl += float(sum(peers.vanilla(row, settings))) / 20
    assert abs(of_verl) > 1e-2
    assert float(ours) * batch.sequences == pytest.approx(of_verl, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus_baseline_takes_the_mean_of_rewards_without_kl(seed):
    """The paper's authors (OpenRLHF 3c3be62, `reinforce_baseline`) shift rewards by the mean of their group, and add
    the KL of each token afterwards. verl (`reinforce_plus_plus_baseline`, `use_kl_in_reward: true`) adds the KL of the
    response first, shifts that, and gives it to every token."""
    batch, coefficient = Case(seed, holes=False).batch, 0.3
    groups, kl = batch.sequence_groups.tolist(), drawn(batch, batch.old_logprobs - batch.reference_logprobs)
    settings = ReinforcePlusPlusSpec(group_baseline=True, kl=RewardKLSpec(coefficient=coefficient))
    ours = algorithm_of(settings).advantages(batch)[batch.response_mask]

    def shifted(rewards: list[float]) -> list[float]:
        return peers.by_group(rewards, groups, lambda one, group: one - peers.mean(group))

    own = shifted(batch.rewards.tolist())
    to_go = [
        reward - coefficient * sum(row[at:]) for reward, row in zip(own, kl, strict=True) for at in range(len(row))
    ]
    np.testing.assert_allclose(ours, peers.whitened(to_go), **EXACT)
    with_kl = [reward - coefficient * sum(row) for reward, row in zip(batch.rewards.tolist(), kl, strict=True)]
    of_verl = [value for value, row in zip(shifted(with_kl), kl, strict=True) for _ in row]
    assert np.abs(ours - peers.whitened(of_verl)).max() > 0.1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("level", "option", "lower", "upper"),
    [
        ("token", "token_k1", 0.9, 1.2),
        ("sequence", "seq_sum_k1", 0.7, 2.5),
        ("geometric", "seq_mean_k1", 0.9, 1.2),
    ],
)
def test_bounds_of_rejection_are_the_inverse_of_verls(level, option, lower, upper, seed):
    """verl: `rollout_rs: token_k1` with `rollout_rs_threshold: 0.9_1.2`, and so on."""
    batch = Case(seed).batch

    def kept(settings: RejectionSpec) -> list[bool]:
        inputs = LossInputs(
            logprobs=torch.from_numpy(batch.old_logprobs[batch.response_mask]),
            entropy=torch.zeros(int(batch.response_mask.sum())),
            rollout_logprobs=torch.from_numpy(batch.rollout_logprobs[batch.response_mask]),
            advantages=torch.ones(int(batch.response_mask.sum())),
            denominator_tokens=1,
            sequence_id=torch.from_numpy(batch.sequence_id[batch.response_mask]),
            denominator_sequences=1,
        )
        factor, _ = correction(inputs, GRPOSpec(importance=None, rejection=settings))
        return factor.bool().tolist()

    expected = [
        keep
        for old, rollout in zip(drawn(batch, batch.old_logprobs), drawn(batch, batch.rollout_logprobs), strict=True)
        for keep in peers.kept_by_k1(peers.Row([], old, rollout, [], []), option, lower, upper)
    ]
    assert 0 < sum(expected) < len(expected)
    assert kept(RejectionSpec(level=level, low=1 / upper, high=1 / lower)) == expected
    assert kept(RejectionSpec(level=level, low=lower, high=upper)) != expected
