"""The optimiser: its learning rate by hand and beside transformers, and moments in 8 bits beside exact ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from fakes.tiny_learner import plain_adamw
from rlhfless.functions.training.adamw import EightBitAdamW, TorchAdamW
from rlhfless.functions.training.block_quantised import BLOCK, blocks_of, quantised, restored, table
from rlhfless.functions.training.learning_rate import learning_rate
from rlhfless.spec import AdamWSpec


def rates(planned: int, **settings: object) -> list[float]:
    spec = AdamWSpec(learning_rate=1.0, **settings)
    return [learning_rate(spec, update, planned) for update in range(1, planned + 3)]


def test_learning_rates_by_hand() -> None:
    assert rates(4, warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]
    assert rates(4, rate_schedule="linear") == [1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(4, rate_schedule="linear", warmup_steps=2, rate_floor=0.2) == pytest.approx([0.5, 1, 1, 0.6, 0.2, 0.2])
    cosine = rates(4, rate_schedule="cosine", rate_floor=0.5)
    half = np.sqrt(0.5)
    assert cosine == pytest.approx([1, 0.75 + 0.25 * half, 0.75, 0.75 - 0.25 * half, 0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_learning_rates_fall_as_those_of_transformers(name, theirs) -> None:
    """After the warm-up, whose first update is 0 there."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = theirs(optimizer, 5, 40)
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(40, rate_schedule=name, warmup_steps=5)[5:40] == pytest.approx(expected[5:], abs=1e-12)


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_is_kept_as_the_nearest_value_of_its_block(signed) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 2 * BLOCK + 7, generator=generator) * 10.0 ** -torch.arange(5)[:, None]
    values = values if signed else values.square()
    values[2, :BLOCK] = 0
    codes, scales = quantised(values, signed=signed)
    assert codes.dtype == torch.uint8
    assert codes.shape == values.shape
    assert scales.shape == (5, blocks_of(values.shape[1])) == (5, 3)
    ours, options = restored(codes, scales, signed=signed), table(values.device, signed=signed).numpy()
    assert len(options) == len(set(options.tolist())) == (255 if signed else 256)
    for row in range(5):
        for block in range(3):
            here = slice(block * BLOCK, (block + 1) * BLOCK)
            part, scale = values[row, here].numpy(), float(values[row, here].abs().max())
            assert float(scales[row, block]) == scale
            nearest = options[np.abs(part[:, None] - scale * options).argmin(1)] * scale
            np.testing.assert_allclose(ours[row, here].numpy(), nearest, rtol=1e-6, atol=0)
    assert (ours.abs().amax(1) == values.abs().amax(1)).all(), "the largest of a block is exact"


def test_a_second_moment_above_0_never_becomes_0() -> None:
    codes, scales = quantised(torch.tensor([[1.0, 1e-12, 0.0]]), signed=False)
    assert restored(codes, scales, signed=False)[0].tolist() == pytest.approx([1.0, 1e-7, 0.0])


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.nn.Parameter(torch.randn(6, 300, generator=generator)),
        "experts": torch.nn.Parameter(torch.randn(3, 4, 70, generator=generator)),
        "norm": torch.nn.Parameter(torch.randn(9, generator=generator)),
    }


def stepped(kind: type, updates: int) -> tuple[dict[str, torch.Tensor], EightBitAdamW | TorchAdamW]:
    held = parameters()
    adamw = kind(held, AdamWSpec(weight_decay=0.1))
    generator = torch.Generator().manual_seed(2)
    for update in range(1, updates + 1):
        for parameter in held.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.3
        adamw.step(1e-2, update)
    return {name: parameter.detach() for name, parameter in held.items()}, adamw


def test_the_first_update_has_no_moments_that_were_rounded() -> None:
    exact, _ = stepped(TorchAdamW, 1)
    ours, _ = stepped(EightBitAdamW, 1)
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_moments_in_8_bits_move_weights_as_exact_ones_do(monkeypatch) -> None:
    monkeypatch.setattr("rlhfless.functions.training.adamw.CHUNK_ELEMENTS", 700)  # two rows at once
    before, (exact, _), (ours, adamw) = parameters(), stepped(TorchAdamW, 40), stepped(EightBitAdamW, 40)
    for name, value in exact.items():
        moved = value - before[name].detach()
        assert float((ours[name] - value).norm() / moved.norm()) < 0.02, name
    torch.testing.assert_close(ours["norm"], exact["norm"], rtol=1e-5, atol=1e-6)
    held = {key: sum(tensor.nbytes for tensor in part.values()) for key, part in adamw.state().items()}
    assert held["exp_avg_codes"] == held["exp_avg_sq_codes"] == 6 * 300 + 3 * 4 * 70
    assert held["exp_avg_scales"] == held["exp_avg_sq_scales"] == 4 * (6 * 2 + 3 * 2)


@pytest.mark.parametrize("kind", [TorchAdamW, EightBitAdamW])
def test_weight_decay_is_for_matrices_alone(kind) -> None:
    held = parameters()
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    adamw = kind(held, AdamWSpec(weight_decay=0.1))
    for parameter in held.values():
        parameter.grad = torch.zeros_like(parameter)
    adamw.step(0.5, 1)
    assert torch.equal(held["norm"], before["norm"])
    for name in ("matrix", "experts"):
        torch.testing.assert_close(held[name].detach(), before[name] * (1 - 0.5 * 0.1))


def test_torchs_groups_are_those_of_a_plain_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    spec = AdamWSpec(weight_decay=0.2)
    groups = TorchAdamW(dict(model.named_parameters()), spec)._optimizer.param_groups
    plain = plain_adamw(model, spec).param_groups
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(p) for p in g["params"]] for g in plain]
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
