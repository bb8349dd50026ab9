"""The elements that are read back, and the codes and scales of weights in 8 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import WeightSample
from rlhfless.weights.samples import (
    FP8,
    SAMPLED_COLUMNS,
    SAMPLED_ELEMENTS,
    decoded,
    product_error,
    sampled_elements,
    weight_sample,
)


def test_a_small_tensor_is_sampled_whole() -> None:
    assert sampled_elements((3, 4), tokens=(1,)).tolist() == list(range(12))
    assert sampled_elements((7,), tokens=()).tolist() == list(range(7))
    assert sampled_elements((), tokens=(5,)).tolist() == [0]
    assert sampled_elements((4, 0), tokens=(1,)).tolist() == []


def test_a_matrix_is_sampled_in_a_grid_with_the_rows_of_the_probe() -> None:
    """1,000 x 64: every second column, and 128 rows, of which three are the tokens."""
    elements = sampled_elements((1000, 64), tokens=(998, 3, 999, 5000))
    rows, columns = elements // 64, elements % 64
    assert columns.unique().tolist() == list(range(0, 64, 2))
    assert {3, 998, 999} <= set(rows.tolist())
    assert rows.unique().tolist()[:2] == [0, 3]
    # 125 rows are evenly spread; the token 3 is no multiple of 8 and 998, 999 are behind the last of them.
    assert len(rows.unique()) == 128


def test_tokens_take_at_most_half_of_the_rows() -> None:
    rows = sampled_elements((100_000, 32), tokens=range(1000)) // 32
    assert int((rows.unique() < 1000).sum()) <= 64 + 1  # and row 0 of those that are spread
    assert int(rows.max()) > 90_000


@given(
    shape=st.lists(st.integers(0, 70), min_size=0, max_size=4),
    tokens=st.lists(st.integers(0, 5000), max_size=200),
)
def test_elements_are_few_different_and_there(shape: list[int], tokens: list[int]) -> None:
    elements = sampled_elements(shape, tokens)
    assert len(elements) <= SAMPLED_ELEMENTS
    assert len(elements.unique()) == len(elements)
    size = torch.Size(shape).numel()
    assert (len(elements) > 0) == (size > 0)
    assert ((elements >= 0) & (elements < size)).all()
    if len(shape) > 1 and size:
        assert len((elements % shape[-1]).unique()) <= SAMPLED_COLUMNS


def test_values_are_in_the_published_dtype_wherever_the_tensor_lies() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()  # not contiguous
    sample = weight_sample(tensor, tokens=(), dtype=torch.bfloat16)
    assert torch.frombuffer(bytearray(sample.values), dtype=torch.bfloat16).tolist() == tensor.flatten().tolist()


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
