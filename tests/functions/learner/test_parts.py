"""A batch that comes in parts: the update is the one of the whole batch, and a try that ended leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fakes.ranks import run_learner as run
from rlhfless.algorithms.batch import NO_DENOMINATORS, PackedBatch, own_denominators, select
from rlhfless.algorithms.passes import LastParts, Passes
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.training.checkpoint import drain
from rlhfless.spec import CISPOSpec, DrGRPOSpec, GRPOSpec, GSPOSpec, KLSpec, RejectionSpec, RLOOSpec, SAPOSpec

KL_OF_LOSS = KLSpec(coefficient=0.1)
ALGORITHMS = [
    GRPOSpec(kl=KL_OF_LOSS, entropy_bonus=0.1),
    GRPOSpec(aggregation="sequence", dual_clip=3.0, rejection=RejectionSpec(low=0.3, high=1.5)),
    DrGRPOSpec(constant_tokens=25, kl=KL_OF_LOSS),
    RLOOSpec(),
    GSPOSpec(),
    CISPOSpec(aggregation="constant"),
    SAPOSpec(),
]


def parts_of(batch: PackedBatch, order: list[list[int]]) -> list[PackedBatch]:
    groups = batch.sequence_groups
    return [own_denominators(select(batch, np.flatnonzero(np.isin(groups, part)))) for part in order]


def learn_in_parts(learner: LearnerRank, parts: list[PackedBatch], sent: int) -> dict[str, float]:
    whole = NO_DENOMINATORS
    for part in parts:
        whole = whole.plus(part.denominators)
    for number, part in enumerate(parts[:sent]):
        learner.accumulate(part, first=number == 0)
    return learner.finish(LastParts("a", sent, tuple(parts[sent:]), whole, 0))


def arrays(learner: LearnerRank) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in learner.weights().items()}


def with_reference(batch: PackedBatch) -> PackedBatch:
    return batch.with_columns(reference_logprobs=batch.rollout_logprobs + 0.1)


def test_an_entropy_bonus_beside_a_mean_over_sequences_needs_the_whole_batch() -> None:
    """The bonus is a mean over tokens: the loss has two denominators, and a gradient is divided by one."""
    assert GSPOSpec(entropy_bonus=0.1).needs.by_group is None
    assert GRPOSpec(entropy_bonus=0.1).needs.by_group == "tokens"


ORDER = [[4], [0, 5], [2], [1, 3]]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.type}-{a.aggregation}")
def test_every_algorithm_that_says_so_learns_the_same_in_parts(learner: Any, batch: Any, algorithm: Any) -> None:
    assert algorithm.needs.by_group == ("tokens" if algorithm.aggregation == "token" else "sequences")
    given = with_reference(batch)
    with learner(algorithm=algorithm, micro_batch_tokens=60) as rank:
        expected, weights = rank.learn(given, Passes()), arrays(rank)
    with learner(algorithm=algorithm, micro_batch_tokens=60) as rank:
        metrics, ours = learn_in_parts(rank, parts_of(given, ORDER), 3), arrays(rank)
        shared = rank.shared_prompt_tokens
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert shared >= 0
    for name, value in weights.items():
        # A step of AdamW turns a gradient of 1e-9 into one of the learning rate, 1e-3.
        np.testing.assert_allclose(ours[name], value, atol=2e-3)
        assert np.abs(ours[name] - value).mean() < 1e-5, name


def exactly(learner: LearnerRank, _: int, batch: PackedBatch, order: list[list[int]], sent: int, tried: bool) -> tuple:
    """Two steps, each in the parts of `order`, all in one call if there are none; the second begins with a try that
    ended. In float64 throughout: norms compute in torch.float32, and round a sum otherwise than a mean."""
    torch.float32 = torch.float64  # in this process alone
    given = with_reference(batch)
    parts = parts_of(given, order)
    metrics = [learn_in_parts(learner, parts, sent) if order else learner.learn(given, Passes())]
    again = replace(given, advantages=None if given.advantages is None else -given.advantages)
    if tried:
        for part in (parts[1], parts[0]):
            learner.accumulate(part, first=part is parts[1])
        drain(learner.published()[0])
    metrics.append(learn_in_parts(learner, parts_of(again, order), sent) if order else learner.learn(again, Passes()))
    return metrics, arrays(learner)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHMS[0], pytest.param(ALGORITHMS[4], marks=pytest.mark.long)],
    ids=lambda algorithm: algorithm.type,
)
def test_in_float64_parts_are_the_whole_to_1e9(tiny_model: str, batch: Any, tmp_path: Any, algorithm: Any) -> None:
    def learned(ranks: int, order: list[list[int]], sent: int, tried: bool, **changes: Any) -> list[Any]:
        folder = tmp_path / f"{ranks}-{len(order)}-{sent}"
        folder.mkdir()
        given = {"batch": batch, "order": order, "sent": sent, "tried": tried}
        return run(exactly, tiny_model, folder, ranks, exact=True, changes={"algorithm": algorithm} | changes, **given)

    ((metrics, weights),) = learned(1, [], 0, False)
    assert metrics[0]["gradient_norm"] > 0
    streamed = [
        *learned(1, ORDER, 3, True),
        *learned(1, ORDER, 4, True, micro_batch_tokens=50),  # all came before: the last call brings none
        *learned(2, ORDER, 2, True),
        *learned(4, ORDER, 3, True, shard_ranks=2),
    ]
    for their_metrics, their_weights in streamed:
        for mine, theirs in zip(metrics, their_metrics, strict=True):
            assert theirs == pytest.approx(mine, abs=1e-9, rel=1e-9)
        for name, value in weights.items():
            assert value.dtype == np.float64
            np.testing.assert_allclose(their_weights[name], value, atol=1e-9, rtol=0, err_msg=name)


def test_which_parts_came_before_the_last_call_changes_no_bit(learner: Any, batch: Any) -> None:
    found = []
    for sent in (0, 2, 4):
        with learner(micro_batch_tokens=60) as rank:
            metrics = learn_in_parts(rank, parts_of(with_reference(batch), ORDER), sent)
            found.append((metrics, arrays(rank)))
    (metrics, weights), *others = found
    for their_metrics, their_weights in others:
        assert their_metrics == metrics
        assert all(np.array_equal(their_weights[name], value) for name, value in weights.items())


@pytest.mark.parametrize("then", ["learn", "restore", "publish"])
def test_parts_that_were_given_up_leave_nothing(learner: Any, batch: Any, tmp_path: Any, then: str) -> None:
    found = []
    for given_up in (False, True):
        with learner() as rank:
            rank.learn(batch, Passes())
            rank.save(tmp_path / str(given_up))
            if given_up:
                rank.accumulate(parts_of(batch, ORDER)[0], first=True)
            if then == "restore":
                rank.restore(tmp_path / str(given_up))
            elif then == "publish":
                stream, _ = rank.published()
                found.append({name: tensor.numpy().copy() for name, tensor in stream.tensors})
            found.append((rank.learn(batch, Passes()), arrays(rank)))
    calm, disturbed = found[: len(found) // 2], found[len(found) // 2 :]
    if then == "publish":
        first, second = calm.pop(0), disturbed.pop(0)
        assert all(np.array_equal(first[name], second[name]) for name in first)
    ((metrics, weights),), ((their_metrics, their_weights),) = calm, disturbed
    assert their_metrics == metrics
    assert all(np.array_equal(their_weights[name], value) for name, value in weights.items())
