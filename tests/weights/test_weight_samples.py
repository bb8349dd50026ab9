"""Which elements of a tensor learner and engine compare."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.weights.samples import SAMPLED_COLUMNS, SAMPLED_ELEMENTS, sampled_elements, weight_sample


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
