"""Packing, selecting and dividing a batch, and passes over it: by hand on a small batch, and as properties on any."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless.algorithms.batch import (
    OWN,
    Denominators,
    NonFinite,
    PackedBatch,
    by_sample,
    declared,
    in_batch_order,
    pack,
    per_token,
    select,
)
from rlhfless.algorithms.passes import Passes, mini_batches
from rlhfless.records import FloatArray, Group, Score

PER_TOKEN = ("tokens", "positions", "response_mask", "rollout_logprobs", "advantages")
FIXTURE_IS_PURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

groups_as_data = st.lists(
    st.tuples(
        st.lists(st.integers(0, 90), min_size=1, max_size=4),
        st.lists(st.lists(st.integers(0, 90), max_size=5), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


def build(make_group, data) -> list[Group]:
    return [make_group(f"p{number:02}", tuple(prompt), responses) for number, (prompt, responses) in enumerate(data)]


def sequences(batch: PackedBatch) -> list[tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]]:
    """Tokens, mask and logprobs of each sequence."""
    return [
        (
            tuple(batch.tokens[batch.sequence_id == index].tolist()),
            tuple(batch.response_mask[batch.sequence_id == index].tolist()),
            tuple(batch.rollout_logprobs[batch.sequence_id == index].tolist()),
        )
        for index in range(batch.sequences)
    ]


def test_pack_by_hand(make_group):
    batch = pack([make_group("b", (7,), [[20]]), make_group("a", (1, 2), [[10, 11], []])])
    assert batch.tokens.tolist() == [1, 2, 10, 11, 1, 2, 7, 20]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert batch.sequence_id.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert batch.group_id.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert batch.response_mask.tolist() == [False, False, True, True, False, False, False, True]
    np.testing.assert_allclose(batch.rollout_logprobs, [0, 0, -0.1, -0.11, 0, 0, 0, -0.2], rtol=1e-6)
    assert batch.denominators == Denominators(tokens=3, sequences=2, groups=2)  # one has no response
    assert batch.lengths.tolist() == [4, 2, 2]
    assert batch.response_lengths.tolist() == [2, 0, 1]
    assert batch.starts.tolist() == [0, 4, 6]
    assert batch.sequence_groups.tolist() == [0, 0, 1]


def test_pack_does_not_depend_on_the_order_of_arrival(make_group):
    groups = [make_group("a", (1,), [[2], [3]]), make_group("b", (4,), [[5], [6]])]
    late = [dataclasses.replace(group, samples=group.samples[::-1]) for group in groups[::-1]]
    assert sequences(pack(late)) == sequences(pack(groups))
    assert [group.prompt.prompt_id for group in in_batch_order(late)] == ["a", "b"]


def test_dtypes_are_those_that_the_learner_trains_on(make_group):
    batch = pack([make_group("a", (1, 2), [[10, 11]])])
    ids = (batch.tokens, batch.positions, batch.sequence_id, batch.group_id)
    assert {array.dtype for array in ids} == {np.dtype(np.int64)}
    assert (batch.response_mask.dtype, batch.rollout_logprobs.dtype) == (np.bool_, np.float32)
    assert {*batch.columns()} == {"rollout_logprobs"}


def test_columns_of_samples_are_packed_in_the_order_of_the_sequences(make_group):
    b = make_group("b", (4,), [[5], [6]])
    b = b.adding(score=[Score(3.0, {}), Score(0.1, {})], reference_logprobs=[np.array([-3.0]), np.array([-4.0])])
    a = make_group("a", (1,), [[2, 3]]).adding(score=[Score(1.0, {})], reference_logprobs=[np.array([-1.0, -2.0])])
    batch = pack([b, a])
    assert batch.rewards.tolist() == [1.0, 3.0, 0.1]  # as float64: 0.1 is 0.1
    assert batch.reference_logprobs.tolist() == [0, -1, -2, 0, -3, 0, -4]
    assert batch.reference_logprobs.dtype == np.float32
    again = by_sample(batch, batch.reference_logprobs, [b, a])
    assert [[values.tolist() for values in of_group] for of_group in again] == [[[-3], [-4]], [[-1, -2]]]
    with pytest.raises(ValueError, match="sample 0 of prompt 'b' has no reference_logprobs, and other samples have"):
        pack([a, b.adding(reference_logprobs=[None, None])])


@dataclasses.dataclass(frozen=True, slots=True)
class WithValues(PackedBatch):
    """A batch with one more column: this declaration is all it needs."""

    values: FloatArray | None = dataclasses.field(default=None, metadata=per_token(np.float32))


def test_a_column_is_declared_once(make_group):
    plain = pack([make_group(name, (1,), [[10], [11, 12]]) for name in "ab"])
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    batch = WithValues(**fields).with_columns(values=np.arange(10.0), rewards=np.arange(4.0))
    assert batch.values.tolist() == [0, 1, 0, 3, 4, 0, 6, 0, 8, 9]
    assert batch.values.dtype == np.float32
    chosen = select(batch, np.array([3, 0]))
    assert (chosen.values.tolist(), chosen.rewards.tolist()) == ([0, 8, 9, 0, 1], [3, 0])
    assert [part.values.tolist() for part in mini_batches(batch, 2, np.arange(batch.groups))] == [
        [0, 1, 0, 3, 4],
        [0, 6, 0, 8, 9],
    ]
    with pytest.raises(ValueError, match=r"rewards have shape \(10,\), expected one per sequence: \(4,\)"):
        batch.with_columns(rewards=np.zeros(10))


def test_groups_without_rollouts_leave_no_gap_in_the_ids(make_group):
    batch = pack([make_group("a", (1,), []), make_group("b", (4,), [[5]])])
    assert batch.group_id.tolist() == [0, 0]
    assert batch.denominators.groups == 1


def test_pack_refuses_groups_without_samples_tokens_or_logprobs(make_group):
    with pytest.raises(ValueError, match="nothing to pack"):
        pack([])
    with pytest.raises(ValueError, match="prompt 'a' has no tokens"):
        pack([make_group("a", (), [[1]])])
    group = make_group("a", (1,), [[2, 3]])
    short = dataclasses.replace(group.rollouts[0], logprobs=np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="sample 0 of prompt 'a' has 2 tokens but 1 rollout logprobs"):
        pack([Group.of(group.prompt, [short])])
    broken = dataclasses.replace(group.rollouts[0], logprobs=np.array([0, np.nan], np.float32))
    with pytest.raises(ValueError, match="rollout_logprobs is not finite: sample 0 of prompt 'a' at"):
        pack([Group.of(group.prompt, [broken])])


def test_values_are_spread_over_response_tokens_only(make_group):
    batch = pack([make_group("a", (1, 2), [[10, 11], [12]])])
    advantages = batch.spread(np.array([3.0, -1.0]))
    assert batch.with_columns(advantages=advantages).advantages.tolist() == [0, 0, 3, 3, 0, 0, -1]
    assert batch.with_columns(old_logprobs=np.full(7, -2.0)).old_logprobs.tolist() == [0, 0, -2, -2, 0, 0, -2]
    referred = batch.with_columns(reference_logprobs=np.full(7, -3.0))
    assert referred.reference_logprobs.tolist() == [0, 0, -3, -3, 0, 0, -3]
    with pytest.raises(ValueError, match=r"one per sequence: \(2,\)"):
        batch.spread(np.zeros(7))
    with pytest.raises(ValueError, match="one per token"):
        batch.with_columns(old_logprobs=np.zeros(2, np.float32))


def test_select_by_hand(make_group):
    batch = pack([make_group("a", (1,), [[10], [11]]), make_group("b", (2,), [[20], [21]])])
    chosen = select(batch.with_columns(advantages=batch.spread(np.arange(4.0))), np.array([3, 0]))
    assert chosen.tokens.tolist() == [2, 21, 1, 10]
    assert chosen.sequence_id.tolist() == [0, 0, 1, 1]
    assert chosen.group_id.tolist() == [0, 0, 1, 1]
    assert chosen.advantages.tolist() == [0, 3, 0, 0]
    assert chosen.denominators == batch.denominators == Denominators(4, 4, 2)
    with pytest.raises(ValueError, match="selected twice"):
        select(batch, np.array([1, 1]))


def test_mini_batches_by_hand(make_group):
    batch = pack([make_group(name, (1,), [[10], [11, 12]]) for name in "abc"])
    first, second = mini_batches(batch, 2, np.arange(batch.groups))
    assert (first.denominators, second.denominators) == (Denominators(6, 4, 2), Denominators(3, 2, 1))
    assert second.group_id.tolist() == [0] * 5
    with pytest.raises(ValueError, match="3 groups into 4"):
        mini_batches(batch, 4, np.arange(3))


@FIXTURE_IS_PURE
@given(data=groups_as_data)
def test_pack_keeps_every_sequence(make_group, data):
    batch = pack(build(make_group, data))
    expected = [tuple(prompt + response) for prompt, responses in data for response in responses]
    assert [tokens for tokens, _, _ in sequences(batch)] == expected
    assert batch.denominators.tokens == sum(len(response) for _, responses in data for response in responses)
    assert not batch.rollout_logprobs[~batch.response_mask].any()


@FIXTURE_IS_PURE
@given(data=groups_as_data, seed=st.integers(0, 1000))
def test_select_of_a_permutation_and_back_is_the_batch(make_group, data, seed):
    batch = pack(build(make_group, data))
    batch = batch.with_columns(advantages=batch.spread(np.arange(batch.sequences, dtype=np.float32)))
    order = np.random.default_rng(seed).permutation(batch.sequences)
    there = select(batch, order)
    assert sequences(there) == [sequences(batch)[index] for index in order]
    back = select(there, np.argsort(order))
    for name in (*PER_TOKEN, "sequence_id", "group_id"):
        np.testing.assert_array_equal(getattr(back, name), getattr(batch, name))


@FIXTURE_IS_PURE
@given(data=groups_as_data, count=st.integers(1, 6))
def test_mini_batches_are_a_partition_into_whole_groups(make_group, data, count):
    batch = pack(build(make_group, data))
    count = min(count, len(data))
    parts = mini_batches(batch, count, np.arange(batch.groups))
    assert [sequence for part in parts for sequence in sequences(part)] == sequences(batch)
    assert sum(part.denominators.tokens for part in parts) == batch.denominators.tokens
    sizes = [part.denominators.groups for part in parts]
    assert sum(sizes) == len(data)
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        assert part.denominators.sequences == np.count_nonzero(part.response_lengths)
        assert part.denominators.tokens == part.response_mask.sum()


FLOATS = sorted(name for name, column in declared(PackedBatch).items() if column.dtype is not np.int64)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("name", [*FLOATS, "of_my_own"])
def test_a_value_that_is_not_finite_is_refused_by_name(make_group, name, value):
    """1e300 overflows float32, the dtype of all columns but rewards."""
    batch = pack([make_group("a", (1, 2), [[10, 20], [30]])])
    known = declared(PackedBatch).get(name, OWN)
    values = np.zeros(len(batch.tokens) if known.per_token else batch.sequences)
    values[-1] = value
    if name == "rewards" and value == 1e300:
        assert batch.with_columns(rewards=values).rewards[-1] == 1e300
        return
    place = "sequence 1 of the batch at its token 2" if known.per_token else "sequence 1 of the batch"
    with pytest.raises(NonFinite, match=f"^{name} is not finite: {place} has ") as refused:
        batch.with_columns(**{name: values})
    assert refused.value.column == name
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


@pytest.mark.parametrize("name", ["reference_logprobs", "values", "of_my_own"])
def test_a_sample_with_a_value_that_is_not_finite_is_named(make_group, name):
    group = make_group("a", (1, 2), [[10, 20], [30, 40]])
    broken = group.adding(**{name: [np.zeros(2, np.float32), np.array([np.nan, np.inf], np.float32)]})
    with pytest.raises(
        NonFinite, match=rf"^{name} is not finite: sample 1 of prompt 'a' at response token 0 has nan \(2"
    ):
        pack([broken])
    failed = group.adding(score=[Score(1.0, {}), Score(np.nan, {})])
    with pytest.raises(NonFinite, match=r"^rewards is not finite: sample 1 of prompt 'a' has nan"):
        pack([failed])


def test_values_of_tokens_that_were_not_generated_are_ignored(make_group):
    batch = pack([make_group("a", (1, 2), [[10, 20]])])
    values = np.where(batch.response_mask, 0.5, np.nan)
    assert batch.with_columns(values=values).values.tolist() == [0, 0, 0.5, 0.5]


@pytest.fixture(scope="module")
def batch_of_six(make_group) -> PackedBatch:
    """Group i has one response of i + 1 tokens, all of them i."""
    return pack([make_group(name, (50,), [[number] * (number + 1)]) for number, name in enumerate("abcdef")])


def tokens_of(part: PackedBatch) -> list[int]:
    return sorted(set(part.tokens[part.response_mask].tolist()))


def test_mini_batches_follow_the_order(batch_of_six):
    parts = mini_batches(batch_of_six, 3, np.array([4, 0, 5, 1, 2, 3]))
    assert [tokens_of(part) for part in parts] == [[0, 4], [1, 5], [2, 3]]
    assert [part.denominators.tokens for part in parts] == [5 + 1, 6 + 2, 3 + 4]


@given(count=st.integers(1, 6), epochs=st.integers(1, 4), seed=st.tuples(st.integers(), st.integers(0, 10**6)))
def test_each_pass_has_every_group_once(batch_of_six, count, epochs, seed):
    passes = Passes(count, epochs, seed)
    parts = [tokens_of(part) for part in passes.over(batch_of_six)]
    assert len(parts) == count * epochs
    for epoch in range(epochs):
        met = [group for part in parts[count * epoch : count * (epoch + 1)] for group in part]
        assert sorted(met) == list(range(6))
    again = [tokens_of(part) for part in Passes(count, epochs, seed).over(batch_of_six)]
    assert parts == again, "a repeated step has the same updates"


def test_passes_and_steps_differ_in_their_order(batch_of_six):
    def order(seed: tuple[int, int]) -> list[list[int]]:
        return [tokens_of(part) for part in Passes(6, 2, seed).over(batch_of_six)]

    first = order((0, 1))
    assert first[:6] != first[6:]
    assert first != order((0, 2))
    assert first != order((1, 1))
