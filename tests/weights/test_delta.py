"""What changed between two versions: exact, short where little changed, and refused where it is not theirs."""

from __future__ import annotations

import io
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.weights import http, http_server
from rlhfless.weights.delta import CHUNK_WORDS, apply, delta
from rlhfless.weights.digest import digest_of
from rlhfless.weights.errors import WeightFileError
from rlhfless.weights.files import Put
from rlhfless.weights.http_server import HttpStoreServer
from rlhfless.weights.parts import mapped, put
from rlhfless.weights.store import FolderStore


def changed(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Another bit pattern in about this share of the elements, NaNs and zeros of both signs among them."""
    random = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in tensors.items():
        bits = tensor.clone().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
        chosen = torch.rand(bits.shape, generator=random) < share
        new[name] = torch.where(chosen, bits ^ 1, bits).view(tensor.dtype)
    return new


def tensors_of(words: int, odd: bool) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(words)
    made = {"a": torch.randn(words, generator=random).bfloat16(), "b": torch.tensor([float("nan"), -0.0, 0.0]).half()}
    return made | ({"z": torch.tensor([7], dtype=torch.uint8)} if odd else {})


@given(
    st.sampled_from([1, 1000, CHUNK_WORDS - 1, CHUNK_WORDS, CHUNK_WORDS + 1, 3 * CHUNK_WORDS + 17]),
    st.sampled_from([0.0, 0.001, 0.05, 0.0625, 0.2, 0.35]),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_applying_it_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, words: int, share: float, odd: bool, seed: int
) -> None:
    store = FolderStore(tmp_path_factory.mktemp("store"))
    before = tensors_of(words, odd)
    old, new = store.put("run", 0, 9, before), store.put("run", 0, 10, changed(before, share, seed))
    changes = io.BytesIO()
    if not delta(Path(old.location), Path(new.location), changes):
        assert share > 0  # of a few words, all may have changed
        return
    made = tmp_path_factory.mktemp("made") / "made"
    with made.open("wb+") as file:
        size = apply(Path(old.location), changes.getvalue(), partial(put, file.fileno()))
    assert made.read_bytes() == mapped(Path(new.location))[:]
    assert size == new.size_bytes


def test_its_size_by_hand(tmp_path: Path) -> None:
    """One chunk with 3 changed words: 8 bytes for the chunk, 2 for each place, 2 for each word. In another, half of a
    sample of its words: a bit for each of the chunk's words."""
    store, words = FolderStore(tmp_path), torch.zeros(4 * CHUNK_WORDS, dtype=torch.bfloat16)
    old = store.put("run", 0, 1, {"w": words})
    few, many = words.clone(), words.clone()
    few[torch.tensor([5, 70, CHUNK_WORDS - 1])] = 1.0
    many[CHUNK_WORDS : CHUNK_WORDS + 10_000] = 1.0
    sizes = {}
    for step, tensor in ((2, few), (3, many), (4, words)):
        new, changes = store.put("run", 0, step, {"w": tensor}), io.BytesIO()
        assert delta(Path(old.location), Path(new.location), changes)
        sizes[step] = len(changes.getvalue()) - (new.size_bytes - words.nbytes)  # without the header
    assert sizes == {2: 24 + 8 + 3 * 4, 3: 24 + 8 + CHUNK_WORDS // 8 + 20_000, 4: 24}


def test_versions_in_which_most_changed_are_sent_whole(tmp_path: Path) -> None:
    store, random = FolderStore(tmp_path), torch.Generator().manual_seed(0)
    first = {"w": torch.randn(5 * CHUNK_WORDS, generator=random)}
    second = {"w": first["w"] + 1e-6 * torch.randn(5 * CHUNK_WORDS, generator=random)}  # float32: every element
    other = {"w": torch.randn(10, generator=random)}
    old, new, small = (store.put("run", 0, step, each) for step, each in enumerate((first, second, other)))
    for version in (new, small):
        changes = io.BytesIO()
        assert not delta(Path(old.location), Path(version.location), changes)
        assert changes.getvalue() == b""


def test_changes_that_are_damaged_or_another_version_s_are_refused(tmp_path: Path) -> None:
    store, before = FolderStore(tmp_path), tensors_of(1000, odd=False)
    old, new = store.put("run", 0, 1, before), store.put("run", 0, 2, changed(before, 0.01, 0))
    small = store.put("run", 0, 3, tensors_of(10, odd=False))
    changes = io.BytesIO()
    assert delta(Path(old.location), Path(new.location), changes)
    data = changes.getvalue()
    for damaged in (data[:-1], data[: len(data) // 2], b"", data[:10]):
        with (tmp_path / "out").open("wb+") as file, pytest.raises(WeightFileError, match="cut short, or damaged"):
            apply(Path(old.location), damaged, partial(put, file.fileno()))
    with (
        (tmp_path / "out").open("wb+") as file,
        pytest.raises(WeightFileError, match=r"changes of 1,\d+ words are not"),
    ):
        apply(Path(small.location), data, partial(put, file.fileno()))


# -- over HTTP


def received(reader: http.HttpStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What a reader downloads from now on: what it asks for, and bytes."""
    seen: list[tuple[str, int]] = []
    pieces = http.HttpStore._download_pieces

    def counting(self: http.HttpStore, url: str, to: Put, what: str, attempts: int = 1) -> int:
        size = pieces(self, url, to, what, attempts)
        seen.append(("changes" if http_server.SINCE in url else "all", size))
        return size

    monkeypatch.setattr(http.HttpStore, "_download_pieces", counting)
    monkeypatch.setattr(http, "_FAST_BYTES_PER_S", math.inf)
    return seen


def test_a_node_that_has_the_version_before_gets_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [tensors_of(200_000, odd=True)]
    for seed in range(3):
        versions.append(changed(versions[-1], 0.02, seed))
    with HttpStoreServer(tmp_path / "store") as server:
        reader = http.HttpStore(server.token, tmp_path / "cache")
        seen = received(reader, monkeypatch)
        for step, tensors in enumerate(versions):
            stored = server.put("run", 0, step, tensors)
            assert digest_of(reader.read(stored.location)) == stored.version.digest
            assert reader.hashes(stored.location)  # sealed: no byte is hashed again
    assert [what for what, _ in seen] == ["all", "changes", "changes", "changes"]
    whole = seen[0][1]
    assert all(size < 0.1 * whole for _, size in seen[1:])
    # The server keeps the changes of the newest version alone.
    assert len(list((tmp_path / "store").glob(f"*{http_server.CHANGES}"))) == 1


def test_over_a_fast_network_it_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tensors_of(100_000, odd=False)
    with HttpStoreServer(tmp_path / "store") as server:
        reader = http.HttpStore(server.token, tmp_path / "cache")
        seen = received(reader, monkeypatch)
        monkeypatch.setattr(http, "_FAST_BYTES_PER_S", 1.0)
        for step in range(2):
            stored = server.put("run", 0, step, changed(before, 0.01 * step, 0))
            assert digest_of(reader.read(stored.location)) == stored.version.digest
    assert [what for what, _ in seen] == ["all", "all"]
    assert float((tmp_path / "cache" / http._RATE).read_text()) > 1.0


def test_it_gets_all_where_changes_are_no_shorter_or_do_not_give_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    with HttpStoreServer(tmp_path / "store") as server:
        reader = http.HttpStore(server.token, tmp_path / "cache")
        seen = received(reader, monkeypatch)
        first = server.put("run", 0, 0, {"w": torch.randn(1000, generator=random)})
        dict(reader.read(first.location))
        second = server.put("run", 0, 1, {"w": torch.randn(1000, generator=random)})
        assert digest_of(reader.read(second.location)) == second.version.digest
        assert [what for what, _ in seen] == ["all", "all"]
        # What the node has of the version before was damaged: the digest says so.
        same = {"w": dict(reader.read(second.location))["w"].clone()}
        same["w"][0] += 1
        path = tmp_path / "cache" / Path(second.location).name / "0"
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        third = server.put("run", 0, 2, same)
        assert digest_of(reader.read(third.location)) == third.version.digest
        assert [what for what, _ in seen] == ["all", "all", "changes", "all"]
        # The server has dropped the version before.
        server.delete(third.version)
        same["w"][1] += 1
        fourth = server.put("run", 0, 3, same)
        assert digest_of(reader.read(fourth.location)) == fourth.version.digest
        assert seen[-1][0] == "all"
