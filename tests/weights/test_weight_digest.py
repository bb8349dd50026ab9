"""The digest names the content: any change of a name, dtype, shape or byte changes it, the order does not."""

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.weights.digest import Digest, digest_of, merged, tensor_at, tensor_bytes


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }


def test_digest_by_hand() -> None:
    # Header "name\0dtype\0shape\0", then the hash of each piece; the hashes of the tensors hashed again, by name.
    one = xxhash.xxh3_128(b"a\0uint8\0(2,)\0" + xxhash.xxh3_128(bytes([7, 8])).digest()).digest()
    two = xxhash.xxh3_128(b"b\0uint8\0(1,)\0" + xxhash.xxh3_128(bytes([9])).digest()).digest()
    expected = xxhash.xxh3_128(one + two).hexdigest()
    b, a = torch.tensor([9], dtype=torch.uint8), torch.tensor([7, 8], dtype=torch.uint8)
    assert digest_of([("b", b), ("a", a)]) == expected


@given(st.permutations(list(_tensors().items())))
def test_the_order_does_not_matter(items: list[tuple[str, torch.Tensor]]) -> None:
    assert digest_of(items) == digest_of(_tensors().items())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("a", torch.arange(6, dtype=torch.float32).reshape(3, 2)),  # shape
        ("a", torch.arange(6, dtype=torch.int32).reshape(2, 3)),  # dtype
        ("a", torch.tensor([[0.0, 1, 2], [3, 4, 5.0000005]])),  # one bit
        ("b", torch.ones(3, dtype=torch.float16)),
        ("scalar", torch.tensor([2], dtype=torch.int64)),
        ("empty", torch.zeros(4, 0)),
    ],
)
def test_any_change_shows(name: str, other: torch.Tensor) -> None:
    assert digest_of((_tensors() | {name: other}).items()) != digest_of(_tensors().items())


def test_a_new_name_shows() -> None:
    renamed = {("c" if name == "a" else name): tensor for name, tensor in _tensors().items()}
    assert digest_of(renamed.items()) != digest_of(_tensors().items())


def test_strides_do_not_matter() -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    strided = plain.t().contiguous().t()
    assert not strided.is_contiguous()
    assert digest_of([("a", strided)]) == digest_of([("a", plain)])


def test_a_name_twice_is_refused() -> None:
    digest = Digest()
    digest.add("a", torch.ones(1))
    with pytest.raises(ValueError, match="'a' came twice"):
        digest.add("a", torch.ones(1))


def test_passing_counts_what_was_taken_and_no_more() -> None:
    digest = Digest()
    passing = digest.passing(_tensors().items())
    taken = [next(passing), next(passing)]
    assert digest.tensors == 2
    assert digest.size_bytes == 6 * 4 + 3 * 2
    assert digest.hexdigest() == digest_of(taken)
    assert digest.hexdigest() != digest_of(_tensors().items())


def test_readers_that_share_the_hashing_arrive_at_the_digest_of_one() -> None:
    tensors = {f"t{number}": torch.full((3,), float(number)) for number in range(7)}
    parts = []
    for reader in range(3):
        digest = Digest()
        assert [name for name, _ in digest.passing(tensors.items(), reader=reader, readers=3)] == list(tensors)
        parts.append(digest.hashes)
    assert [sum(map(bool, part.values())) for part in parts] == [3, 2, 2], "each byte is hashed by one of them"
    assert merged(parts).hexdigest() == digest_of(tensors.items())
    assert merged(parts[:2]).hexdigest() != digest_of(tensors.items())


def test_a_tensor_among_bytes_is_a_view_where_its_place_allows() -> None:
    value = torch.tensor([[1.5, -2.0], [0.25, 8.0]], dtype=torch.bfloat16)
    data = torch.tensor([*bytes(2), *tensor_bytes(value), 1, *tensor_bytes(value)], dtype=torch.uint8)
    even, flag, odd = (
        tensor_at(data, 2, "bfloat16", [2, 2]),
        tensor_at(data, 10, "bool", []),
        tensor_at(data, 11, "bfloat16", [2, 2]),
    )
    assert torch.equal(even, value)
    assert torch.equal(odd, value)
    assert flag.item() is True
    assert even.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    assert odd.untyped_storage().data_ptr() != data.untyped_storage().data_ptr()
