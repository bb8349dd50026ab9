"""Codes and scales of weights in 8 bits, worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import WeightSample
from rlhfless.weights.samples import FP8, decoded, product_error, sampled_elements, weight_sample


def test_codes_of_fp8_by_hand() -> None:
    """Three bits of mantissa: between 256 and 448 codes are 32 apart, between 1 and 2 an eighth, below 2^-6 2^-9."""
    codes = FP8
    assert codes.scales(torch.tensor([448.0, 0.0])).tolist() == pytest.approx([1.0, 1 / (448 * 512)], rel=1e-6)
    values = torch.tensor([[448.0, 300.0, 1.07, 1.05, -0.003, 500.0]])
    assert codes.of(values, torch.ones(1, 1)).float().tolist() == [[448.0, 288.0, 1.125, 1.0, -2 * 2**-9, 448.0]]
    halved = codes.as_drawn_with(values[:, :5] / 2, torch.tensor([224.0]))
    assert halved.tolist() == [[224.0, 144.0, 0.5625, 0.5, -(2**-9)]]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=32))
def test_no_value_moves_further_than_half_of_a_step(row: list[float]) -> None:
    codes, values = FP8, torch.tensor([row])
    scale = codes.scales(values.abs().amax(1))
    moved = (codes.as_drawn_with(values, values.abs().amax(1)) - values).abs()
    # Half of a step is a sixteenth of the value, and 2^-10 near zero.
    allowed = (values.abs() / 16).clamp_min(2**-10 * scale.item())
    assert (moved <= allowed * (1 + 1e-5) + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sample_gives_the_codes_of_the_whole_matrix(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(300, 200).to(dtype)
    codes = FP8
    whole = codes.as_drawn_with(matrix, matrix.abs().amax(1))
    sample = weight_sample(matrix, (7, 299), dtype)
    elements = sampled_elements(matrix.shape, (7, 299))
    assert torch.equal(decoded(sample, codes), whole.flatten()[elements])
    assert torch.equal(decoded(sample), matrix.flatten()[elements])
    # The largest of a row is seldom among its sampled columns, so it comes with the sample.
    assert len(sample.row_maxima) == 4 * len((elements // 200).unique())


def test_vectors_have_no_rows() -> None:
    assert weight_sample(torch.ones(3), (), torch.float32) == WeightSample(
        torch.ones(3).numpy().tobytes(), b"", (3,), "float32"
    )
    assert weight_sample(torch.ones(3, 0), (), torch.float32) == WeightSample(b"", b"", (3, 0), "float32")


def test_neighbouring_codes_are_told_apart_in_bfloat16() -> None:
    """A step of fp8 is at least 1/15 of a value (1.875 to 2); two products must not meet."""
    assert 2 * product_error(torch.bfloat16) < 1 / 15
    assert product_error(torch.bfloat16) == pytest.approx(2**-8, abs=2e-6)
    assert product_error(torch.float32) < 2e-6
