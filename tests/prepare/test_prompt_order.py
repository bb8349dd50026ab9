"""Batches as a function of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import Prompt


def prompts(count):
    return [Prompt(str(i), (i,), f"prompt {i}") for i in range(count)]


def ids(batch):
    return [int(prompt.prompt_id) for prompt in batch]


def test_unshuffled_batches_go_round_in_a_circle():
    order = PromptOrder(prompts(5), seed=0, shuffle=False)
    assert [ids(order.batch(step, 2)) for step in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_an_epoch_has_every_prompt_once_and_the_next_has_another_order():
    order = PromptOrder(prompts(12), seed=3, shuffle=True)
    epochs = [[i for step in range(3 * e, 3 * e + 3) for i in ids(order.batch(step, 4))] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_another_seed_gives_another_order():
    first, second = (PromptOrder(prompts(50), seed, shuffle=True).batch(0, 50) for seed in (0, 1))
    assert ids(first) != ids(second)


@given(
    count=st.integers(1, 30),
    size=st.integers(1, 30),
    step=st.integers(0, 200),
    seed=st.integers(-(2**63), 2**63),
    shuffle=st.booleans(),
)
def test_a_batch_depends_on_the_step_alone_and_repeats_no_prompt(count, size, step, seed, shuffle):
    size = min(size, count)
    used = PromptOrder(prompts(count), seed, shuffle)
    for earlier in range(max(0, step - 3), step):
        used.batch(earlier, size)
    batch = ids(used.batch(step, size))
    assert batch == ids(PromptOrder(prompts(count), seed, shuffle).batch(step, size))
    assert len(set(batch)) == size


@pytest.mark.parametrize(("step", "size"), [(0, 6), (0, 0), (-1, 2)])
def test_an_impossible_batch_is_refused(step, size):
    with pytest.raises(ValueError, match=f"no batch of {size} for step {step}: there are 5 prompts"):
        PromptOrder(prompts(5), seed=0, shuffle=True).batch(step, size)
