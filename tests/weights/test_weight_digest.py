"""The digest of weights and the hash that is computed where a tensor is: any change shows, and no layout does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhfless.functions.learner.controller import StoreHome
from rlhfless.spec import Transport
from rlhfless.weights import digest
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.digest import Digest, device_piece_hash, digest_of, hash_of, merged, tensor_at, tensor_bytes
from rlhfless.weights.files import TensorStream


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


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


WORDS = 1 << 14
"""Words of the longest piece here."""


def factors() -> tuple[list[int], list[int]]:
    """The outputs of SplitMix64 by Vigna's definition, made odd, for each of the two sums."""
    said, state, mask = [], 0, 2**64 - 1
    for _ in range(2 * WORDS):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        said.append((z ^ (z >> 31)) | 1)
    return said[:WORDS], said[WORDS:]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(digest, "PIECE_BYTES", 4 * WORDS)
    monkeypatch.setattr(digest, "_WORDS_IN_CACHE", 1000)
    digest._coefficients.cache_clear()
    yield
    digest._coefficients.cache_clear()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_sums_of_products_by_hand(device: str) -> None:
    by_hand = factors()
    for size in (0, 1, 3, 4, 5, 4096, 4 * WORDS - 1, 4 * WORDS):
        data = np.random.default_rng(size).bytes(size)
        words = np.frombuffer(data + bytes(-size % 4), "<i4").tolist()
        sums = [sum(a * b for a, b in zip(each, words, strict=False)) % 2**64 for each in by_hand]
        piece = torch.tensor(list(data), dtype=torch.uint8, device=device)
        assert device_piece_hash(piece) == b"".join(each.to_bytes(8, "little") for each in sums)


@given(
    st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn]),
    st.integers(2, 300),
    st.data(),
)
def test_one_bit_and_two_elements_that_change_places_show(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(0, 256, (count, dtype.itemsize), dtype=torch.uint8, generator=generator)
    before = hash_of("w", bits.view(dtype).flatten(), device_piece_hash)
    flipped = bits.clone()
    row, column = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, dtype.itemsize - 1))
    flipped[row, column] ^= 1 << data.draw(st.integers(0, 7))
    assert hash_of("w", flipped.view(dtype).flatten(), device_piece_hash) != before
    other = data.draw(st.integers(0, count - 1))
    assume(not torch.equal(bits[row], bits[other]))
    swapped = bits.clone()
    swapped[[row, other]] = bits[[other, row]]
    assert hash_of("w", swapped.view(dtype).flatten(), device_piece_hash) != before


def test_random_changes_never_collide() -> None:
    """With one sum of 64 bits, or weak factors, pairs of top bits would be among the first to."""
    words = torch.zeros(2000, dtype=torch.int32)
    seen = set()
    for first in range(0, 2000, 40):
        for second in range(first + 1, 2000, 40):
            changed = words.clone()
            changed[[first, second]] = -(2**31)
            seen.add(device_piece_hash(changed.view(torch.uint8)))
    assert len(seen) == sum(len(range(first + 1, 2000, 40)) for first in range(0, 2000, 40))


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_where_a_tensor_lies_and_its_strides_do_not_matter(start: int) -> None:
    value = torch.randn(7, 5).bfloat16()
    memory = torch.zeros(200, dtype=torch.uint8)
    flat = value.contiguous().view(torch.uint8).flatten()
    memory[start : start + len(flat)] = flat
    assert device_piece_hash(memory[start : start + len(flat)]) == device_piece_hash(flat)
    assert hash_of("w", value.t().contiguous().t(), device_piece_hash) == hash_of("w", value, device_piece_hash)


def test_large_tensors_are_hashed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(3, 1000)
    monkeypatch.setattr(digest, "PIECE_BYTES", 4096)
    whole = hash_of("w", value, device_piece_hash)
    swapped = value.flatten().clone()
    swapped[[10, 10 + 1024]] = swapped[[10 + 1024, 10]]  # the same word of two pieces
    assert hash_of("w", swapped.view(3, 1000), device_piece_hash) != whole


class Counted:
    """Counts what xxh3 is given: bytes of the host."""

    seen = 0
    real = xxhash.xxh3_128

    def __init__(self, data: bytes = b"") -> None:
        self._hasher = Counted.real()
        self.update(data)

    def update(self, data: bytes | memoryview) -> None:
        Counted.seen += len(data)
        self._hasher.update(data)

    def digest(self) -> bytes:
        return self._hasher.digest()

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "file"])
def test_no_byte_of_weights_on_gpus_is_hashed_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    """What the host hashes are 16 bytes for each piece; names and shapes."""
    monkeypatch.setattr(digest.xxhash, "xxh3_128", Counted)
    tensors = {f"w{number}": torch.randn(300, 300) for number in range(3)}
    token = "secret" if transport == "nccl" else ""
    store: Any = StoreHome(str(tmp_path / "store"), token, transport, 1).open("127.0.0.1")
    Counted.seen = 0
    stored = store.put("run", 1, 1, tensors)
    published = Counted.seen
    folder = str(tmp_path / ("cache" if token else "store"))
    reader = StoreAddress(transport, folder, token).connect()
    consumed = Digest(reader.of_piece)
    with ThreadPoolExecutor(1) as pool:
        feeding = (
            pool.submit(store.feed, stored.version, 1, TensorStream.of(tensors)) if transport == "cuda_ipc" else None
        )
        assert dict(consumed.passing(reader.read(stored.location))).keys() == tensors.keys()
        assert feeding is None or feeding.result() == 1
    assert consumed.hexdigest() == stored.version.digest
    reader.release()
    size = sum(tensor.nbytes for tensor in tensors.values())
    if transport == "file":
        assert published > size
        assert Counted.seen - published > size
    else:
        assert Counted.seen < 2000
        assert stored.version.digest == digest_of(tensors.items(), device_piece_hash)
    if transport == "nccl":
        store.close()
