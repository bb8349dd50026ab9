"""Prompts of several sets: each step has its share of each, in an order that follows from seed and step alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.prepare.prompt_order import MixtureOrder
from rlhfless.records import Prompt


def order_of(sizes: dict[str, int], weights: dict[str, float], seed: int = 0, shuffle: bool = True) -> MixtureOrder:
    prompts = [Prompt(f"{name}/{i}", (1,), "", source=name) for name, size in sizes.items() for i in range(size)]
    return MixtureOrder(prompts, weights, seed, shuffle)


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def counts(prompts: list[Prompt]) -> dict[str, int]:
    return dict(Counter(prompt.source for prompt in prompts))


def test_shares_by_hand() -> None:
    """5 prompts by 3 to 1: 3.75 and 1.25 of each step."""
    order = order_of({"a": 20, "b": 20}, {"a": 3, "b": 1})
    assert [counts(order.batch(step, 5)) for step in range(4)] == [
        {"a": 4, "b": 1},
        {"a": 4, "b": 1},  # 7.5 and 2.5: the first of equals
        {"a": 3, "b": 2},
        {"a": 4, "b": 1},
    ]


def test_a_set_of_less_than_a_prompt_per_step_has_its_turn() -> None:
    order = order_of({"a": 9, "b": 9, "c": 9}, {"a": 1, "b": 1, "c": 0.5})
    given_ = [counts(order.batch(step, 1)) for step in range(5)]
    assert sorted(name for one in given_ for name in one) == ["a", "a", "b", "b", "c"]


def test_in_the_order_of_the_files_without_shuffling() -> None:
    order = order_of({"a": 5, "b": 2}, {"a": 1, "b": 1}, shuffle=False)
    assert [ids(order.batch(step, 4)) for step in range(3)] == [
        ["a/0", "a/1", "b/0", "b/1"],
        ["a/2", "a/3", "b/0", "b/1"],
        ["a/0", "a/1", "b/0", "b/1"],  # the last one of an epoch is left over
    ]


SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(12, 30), min_size=1)


@given(SIZES, st.data())
def test_steps_keep_their_shares_and_do_not_depend_on_those_before(sizes: dict[str, int], data: st.DataObject) -> None:
    weights = {name: data.draw(st.floats(0.05, 5)) for name in sizes}
    n, seed = data.draw(st.integers(1, 11)), data.draw(st.integers(0, 9))
    order, steps = order_of(sizes, weights, seed), 25
    batches = [order.batch(step, n) for step in range(steps)]
    for batch in batches:
        assert len(batch) == len(set(ids(batch))) == n
    total = Counter(prompt.source for batch in batches for prompt in batch)
    for name, weight in weights.items():
        assert abs(total[name] - n * steps * weight / sum(weights.values())) <= len(weights)
    resumed = order_of(sizes, weights, seed)
    assert [ids(resumed.batch(step, n)) for step in (steps - 1, 3)] == [ids(batches[-1]), ids(batches[3])]


@given(st.integers(1, 6), st.integers(0, 5))
def test_every_prompt_of_a_set_comes_once_before_any_comes_again(n: int, seed: int) -> None:
    order = order_of({"a": 6 * n, "b": 50}, {"a": 1, "b": 1}, seed)
    drawn = [name for step in range(6) for name in ids(order.batch(step, 2 * n)) if name.startswith("a/")]
    assert sorted(drawn) == sorted(f"a/{i}" for i in range(6 * n))


def test_others_are_drawn_by_weight_and_not_used_ones() -> None:
    order = order_of({"a": 400, "b": 100}, {"a": 1, "b": 3})
    others = order.others(3, 60, {"a/1", "b/2"})
    assert ids(others) == ids(order_of({"a": 400, "b": 100}, {"a": 1, "b": 3}).others(3, 60, {"a/1", "b/2"}))
    assert not {"a/1", "b/2"} & set(ids(others))
    assert 30 <= counts(others)["b"] <= 55, "45 in the mean, less as b is used up"


def test_a_share_above_a_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no 4 prompts of a set for a step: it has 3"):
        order_of({"a": 3}, {"a": 1}).batch(0, 4)
