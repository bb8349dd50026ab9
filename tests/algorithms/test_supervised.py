"""SFT, DPO and Bradley-Terry losses: by hand, against TRL's own losses, and as shares that add up."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peers import trl_trainer
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfless.algorithms.batch import select
from rlhfless.algorithms.supervised import (
    DPO,
    SFT,
    BradleyTerry,
    Objective,
    SupervisedInputs,
    evaluate,
    objective_of,
    pack_examples,
)
from rlhfless.records.rollouts import Example
from rlhfless.spec import DPOSpec

PAIRS, WIDTH = 5, 9


def pairs(seed: int = 0) -> list[Example]:
    """Pairs of ragged responses to ragged prompts."""
    generator = np.random.default_rng(seed)
    made = []
    for number in range(PAIRS):
        prompt = tuple(generator.integers(0, 7, 1 + number % 3).tolist())
        sequences = tuple((*prompt, *generator.integers(0, 7, generator.integers(1, WIDTH)).tolist()) for _ in "cr")
        made.append(Example(f"p{number}", prompt, "", {}, "", sequences, (len(prompt),) * 2))
    return made


def inputs_of(batch: Any, outputs: torch.Tensor, reference: torch.Tensor | None = None) -> SupervisedInputs:
    mask = torch.from_numpy(batch.response_mask)
    return SupervisedInputs(
        outputs[mask],
        torch.from_numpy(batch.sequence_id)[mask],
        batch.denominators.tokens,
        batch.denominators.groups,
        None if reference is None else reference[mask],
    )


def test_a_batch_has_the_examples_in_their_order_and_learns_the_responses() -> None:
    first = Example("b", (1,), "", {}, "", ((1, 2, 3), (1, 4)), (1, 1))
    second = Example("a", (5, 6), "", {}, "", ((5, 6, 7), (5, 6, 8, 9)), (2, 2))
    batch = pack_examples([first, second])
    assert batch.tokens.tolist() == [1, 2, 3, 1, 4, 5, 6, 7, 5, 6, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert batch.sequence_groups.tolist() == [0, 0, 1, 1]
    assert np.flatnonzero(batch.response_mask).tolist() == [1, 2, 4, 7, 10, 11]
    assert (batch.denominators.tokens, batch.denominators.sequences, batch.denominators.groups) == (6, 4, 2)


def test_spans_of_a_sequence_are_learned_and_the_rest_is_not() -> None:
    spans = (((2, 4), (6, 7)), ((1, 3),))
    example = Example("b", (1,), "", {}, "", ((1, 2, 3, 4, 5, 6, 7), (1, 4, 5)), (2, 1), spans)
    batch = pack_examples([example])
    assert np.flatnonzero(batch.response_mask).tolist() == [2, 3, 6, 8, 9]
    assert batch.response_lengths.tolist() == [3, 2]
    assert batch.denominators.tokens == 5


def test_sft_is_the_mean_over_tokens_and_not_over_sequences() -> None:
    batch = pack_examples(
        [Example("a", (0,), "", {}, "", ((0, 1, 2, 3),), (1,)), Example("b", (0,), "", {}, "", ((0, 1),), (1,))]
    )
    outputs = torch.tensor([0, math.log(0.5), math.log(0.25), 0.0, 0, math.log(0.125)])
    given = SFT().loss(inputs_of(batch, outputs))
    assert float(given.loss) == pytest.approx(math.log(2) * (1 + 2 + 0 + 3) / 4)


def test_dpo_of_one_pair_by_hand() -> None:
    batch = pack_examples([Example("a", (0,), "", {}, "", ((0, 1, 2), (0, 3)), (1, 1))])
    policy, reference = torch.tensor([0, -1.0, -2.0, 0, -4.0]), torch.tensor([0, -2.0, -2.0, 0, -3.0])
    # Log ratios are -3 + 4 = 1 and -4 + 3 = -1; with beta 0.5 the rewards are 0.5 and -0.5.
    given = DPO(DPOSpec(beta=0.5)).loss(inputs_of(batch, policy, reference))
    assert float(given.loss) == pytest.approx(math.log(1 + math.exp(-1)))
    figures = {name: float(value) for name, value in given.metrics.items()}
    assert figures == {
        "preference_accuracy": 1.0,
        "preference_margin": 1.0,
        "chosen_reward": 0.5,
        "rejected_reward": -0.5,
    }
    smoothed = DPO(DPOSpec(beta=0.5, label_smoothing=0.25)).loss(inputs_of(batch, policy, reference))
    assert float(smoothed.loss) == pytest.approx(0.75 * math.log(1 + math.exp(-1)) + 0.25 * math.log(1 + math.e))
    with pytest.raises(ValueError, match="reference logprobs"):
        DPO(DPOSpec()).loss(inputs_of(batch, policy))


def test_equal_rewards_are_no_preference() -> None:
    batch = pack_examples([Example("a", (0,), "", {}, "", ((0, 1), (0, 2)), (1, 1))])
    given = BradleyTerry().loss(inputs_of(batch, torch.zeros(4)))
    assert float(given.loss) == pytest.approx(math.log(2))
    assert float(given.metrics["preference_accuracy"]) == 0.5


def accuracy_of_pair(
    objective: Objective, chosen: list[float], rejected: list[float], reference: tuple[list[float], list[float]] | None
) -> float:
    """Evaluate one pair from the logprobs or scores of its tokens."""
    sequences = tuple((0, *range(1, len(each) + 1)) for each in (chosen, rejected))
    batch = pack_examples([Example("a", (0,), "", {}, "", sequences, (1, 1))])
    outputs = torch.tensor([0, *chosen, 0, *rejected])
    of_reference = None if reference is None else torch.tensor([0, *reference[0], 0, *reference[1]])
    return float(objective.loss(inputs_of(batch, outputs, of_reference)).metrics["preference_accuracy"])


SHORT, LONG = [-1.0, -0.001], [-2.5] * 200


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("nats", "of_long", "expected"),
    [
        (0.0, [], 0.5),
        (1e-7, [], 0.5),
        (-1e-7, [], 0.5),
        (0.0, [(0, 1e-6), (7, -4e-7), (30, 2e-7)], 0.5),
        (0.0, [(at, (-1) ** at * 4.8e-7) for at in range(200)], 0.5),
        (0.5, [], 1.0),
        (-0.5, [], 0.0),
        (0.0, [(3, -0.5)], 1.0),
        (0.0, [(3, 0.5)], 0.0),
    ],
    ids=lambda value: f"{len(value)} tokens" if isinstance(value, list) else str(value),
)
def test_rounding_is_no_preference(dtype: Any, nats: float, of_long: list[tuple[int, float]], expected: float) -> None:
    """Equal weights in batches of other shapes give log ratios of either sign that are not exactly 0. `nats` is added
    to the first token of the chosen response, `of_long` to tokens of the rejected one."""
    rejected = list(LONG)
    for at, of_token in of_long:
        rejected[at] += of_token
    chosen = [SHORT[0] + nats, SHORT[1]]
    assert accuracy_of_pair(DPO(DPOSpec(beta=0.1), dtype), chosen, rejected, (SHORT, LONG)) == expected


def test_the_accuracy_of_a_policy_that_is_its_reference_is_one_half_in_any_batching() -> None:
    """Of a real model, whose reference logprobs are from batches of other shapes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    examples = pairs(3)
    batch = pack_examples(examples)

    def logprobs(extra: int) -> torch.Tensor:
        """Add tokens after each sequence, which change only the shapes."""
        found = []
        for example in examples:
            for sequence in example.sequences:
                ids = torch.tensor([[*sequence, *[0] * extra]])
                of_tokens = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
                found += [torch.zeros(1), of_tokens[: len(sequence) - 1]]
        return torch.cat(found)

    with torch.no_grad():
        policy, reference = logprobs(0), logprobs(61)
    assert (policy != reference).any(), "the case must have rounding"
    given = DPO(DPOSpec()).loss(inputs_of(batch, policy, reference))
    assert float(given.metrics["preference_accuracy"]) == 0.5


@pytest.mark.parametrize(
    ("dtype", "chosen", "rejected", "expected"),
    [
        ("float32", 0.0, 0.0, 0.5),
        ("float32", 1.5, 1.5, 0.5),
        ("float32", 1.5000001, 1.5, 0.5),
        ("float32", -3.0, -3.0000002, 0.5),
        ("float32", 1.500005, 1.5, 0.5),  # 13 held-out pairs of a trained model before step 1: .462 instead of .5
        ("float32", 1.501, 1.5, 1.0),
        ("float32", 1.5, 1.501, 0.0),
        ("bfloat16", 1.5, 1.5 + 2**-8, 0.5),
        ("bfloat16", 1.5, 1.5 - 2**-8, 0.5),
        ("bfloat16", 1.5, 1.48, 0.5),
        ("bfloat16", 1.5, 1.45, 1.0),
        ("bfloat16", 100.0, 100.5, 0.5),
    ],
)
def test_equal_scores_are_a_tie(dtype: Any, chosen: float, rejected: float, expected: float) -> None:
    assert accuracy_of_pair(BradleyTerry(dtype), [chosen], [rejected], None) == expected


@pytest.mark.parametrize("objective", [SFT(), DPO(DPOSpec(label_smoothing=0.1)), BradleyTerry()], ids=type)
def test_shares_of_micro_batches_add_up_and_held_out_figures_are_those_of_the_loss(objective: Objective) -> None:
    batch = pack_examples(pairs())
    generator = torch.Generator().manual_seed(3)
    outputs = -torch.rand(len(batch.tokens), generator=generator, dtype=torch.float64)
    reference = -torch.rand(len(batch.tokens), generator=generator, dtype=torch.float64)
    batch = batch.with_columns(reference_logprobs=np.where(batch.response_mask, reference, 0))
    whole = objective.loss(inputs_of(batch, outputs, reference))
    loss, metrics = 0.0, defaultdict(float)
    for of_part in ([0, 1, 6, 7], [4, 5], [2, 3, 8, 9], []):
        part = select(batch, np.array(of_part, dtype=np.int64))
        source = torch.from_numpy(np.flatnonzero(np.isin(batch.sequence_id, of_part)))
        given = objective.loss(inputs_of(part, outputs[source], reference[source]))
        loss += float(given.loss)
        for name, value in given.metrics.items():
            metrics[name] += float(value)
    assert loss == pytest.approx(float(whole.loss))
    assert metrics == pytest.approx({name: float(value) for name, value in whole.metrics.items()})
    assert evaluate(objective, batch, outputs.numpy()) == pytest.approx({"loss": loss, **metrics}, rel=1e-6)


def test_each_type_has_its_objective() -> None:
    kinds = {name: type(objective_of(name, DPOSpec(), "float32")) for name in ("sft", "dpo", "reward_model")}  # type: ignore[arg-type]
    assert kinds == {"sft": SFT, "dpo": DPO, "reward_model": BradleyTerry}
    with pytest.raises(ValueError, match="rlhf"):
        objective_of("rlhf", DPOSpec(), "float32")


class Accelerator:
    device = torch.device("cpu")

    @staticmethod
    def gather_for_metrics(value: torch.Tensor) -> torch.Tensor:
        return value

    gather = gather_for_metrics


def padded(examples: list[Example], values: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As TRL pads: all chosen sequences, then all rejected ones. `values` [tokens] and the mask of responses, each
    `[2 * pairs, longest]`."""
    longest = int(batch.lengths.max())
    rows, masks = torch.zeros(2 * len(examples), longest, dtype=values.dtype), torch.zeros(2 * len(examples), longest)
    for sequence in range(batch.sequences):
        row = sequence // 2 + (sequence % 2) * len(examples)
        own = batch.sequence_id == sequence
        rows[row, : own.sum()] = values[torch.from_numpy(own)]
        masks[row, : own.sum()] = torch.from_numpy(batch.response_mask[own]).float()
    return rows, masks


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_dpo_is_trls(label_smoothing: float) -> None:
    """Compute loss and gradient by TRL's trainer, called on a stand-in with what it reads. Its loss type `sigmoid` has
    no smoothing, so the losses of pairs of both signs are added here."""
    trainer = trl_trainer("dpo_trainer").DPOTrainer
    examples = pairs(1)
    batch = pack_examples(examples)
    generator = torch.Generator().manual_seed(5)
    policy = (-3 * torch.rand(len(batch.tokens), generator=generator, dtype=torch.float64)).requires_grad_()
    reference = -3 * torch.rand(len(batch.tokens), generator=generator, dtype=torch.float64)
    ours = DPO(DPOSpec(beta=0.3, label_smoothing=label_smoothing)).loss(inputs_of(batch, policy, reference))

    def theirs(sign: float) -> torch.Tensor:
        rows, masks = padded(examples, policy, batch)
        references, _ = padded(examples, reference, batch)
        learned, of_reference = (rows * masks)[:, 1:], ((references * masks).sum(1)).chunk(2)
        zeros = torch.zeros_like(learned)
        outputs = SimpleNamespace(
            log_probs=learned, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
        )
        me = SimpleNamespace(
            model=SimpleNamespace(training=False), accelerator=Accelerator, aux_loss_enabled=False, ld_alpha=None,
            precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
            beta=sign * 0.3, label_smoothing=0.0, use_weighting=False, _total_train_tokens=0, _tp_size=1,
            _metrics={"eval": defaultdict(list)},
        )  # fmt: skip
        given = {
            "input_ids": torch.zeros(len(rows), rows.shape[1], dtype=torch.int64),
            "attention_mask": torch.ones(len(rows), rows.shape[1]),
            "completion_mask": masks,
            "ref_chosen_logps": of_reference[0],
            "ref_rejected_logps": of_reference[1],
        }
        return trainer._compute_loss(me, lambda **_: outputs, given, False)

    expected = (1 - label_smoothing) * theirs(1.0) + label_smoothing * theirs(-1.0)
    torch.testing.assert_close(ours.loss, expected, atol=1e-9, rtol=0)
    (gradient,) = torch.autograd.grad(ours.loss, policy)
    (expected_gradient,) = torch.autograd.grad(expected, policy)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=1e-9)
    assert gradient.abs().max() > 1e-3


def test_the_loss_of_a_reward_model_is_trls() -> None:
    trainer = trl_trainer("reward_trainer").RewardTrainer
    examples = [
        Example(f"p{number}", (1,), "", {}, "", ((1, 2, 0), (1, 3, 0)), (2, 2)) for number in range(PAIRS)
    ]  # the last token stands for the score
    batch = pack_examples(examples)
    scores = torch.randn(2 * PAIRS, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()
    outputs = torch.zeros(len(batch.tokens), dtype=torch.float64)
    outputs = outputs.index_put((torch.from_numpy(np.flatnonzero(batch.response_mask)),), scores)
    ours = BradleyTerry().loss(inputs_of(batch, outputs))
    logits = torch.cat([scores[0::2], scores[1::2]])[:, None]
    me = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=Accelerator, _total_train_tokens=0, _tp_size=1,
        args=SimpleNamespace(center_rewards_coefficient=None), _metrics={"eval": defaultdict(list)},
    )  # fmt: skip
    given = {"attention_mask": torch.ones(2 * PAIRS, 2)}
    expected = trainer.compute_loss(me, lambda **_: SimpleNamespace(logits=logits), given)
    torch.testing.assert_close(ours.loss, expected, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(loss, scores, retain_graph=True)[0] for loss in (ours.loss, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    metrics = me._metrics["eval"]
    assert float(ours.metrics["preference_accuracy"]) == pytest.approx(metrics["accuracy"][0])
    assert float(ours.metrics["preference_margin"]) == pytest.approx(metrics["margin"][0])
