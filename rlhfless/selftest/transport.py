"""How fast weights move on this node, in GB/s: of synthetic weights, without a model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rlhfless.scaling.memory import version_bytes
from rlhfless.selftest.check import Measured, Wrong, check
from rlhfless.selftest.subject import Subject
from rlhfless.weights.digest import digest_of
from rlhfless.weights.files import TensorStream, write_tensors
from rlhfless.weights.http import HttpStore
from rlhfless.weights.http_server import HttpStoreServer
from rlhfless.weights.store import FolderStore

TENSORS = 32

MOST_BYTES, FEWEST_BYTES = 2**30, 2**27
"""The size of the synthetic weights: as many as the model has, within these."""

SHARE = 8
"""Four versions and a cache of them fit into the free memory of the folder with room to spare."""

SLOWEST_SHARE = 0.1
"""The lowest share of a plain copy's rate. Publishing reads, hashes and writes each byte: what is slower than this
waits for something."""


@contextmanager
def _timed(rates: dict[str, float], name: str, size_bytes: int) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    rates[f"{name}_gb_per_s"] = size_bytes / (time.perf_counter() - began_s) / 1e9


@check("weights", "put weights.folder on a faster disk or in shared memory; look for other work on the machine")
def weights(subject: Subject) -> Measured:
    """Copy, hash, write; publish and read through the folder; read by HTTP, over loopback."""
    wanted = version_bytes(subject.asked.shape, subject.spec.model.dtype)
    free = shutil.disk_usage(subject.folder).free // SHARE
    size = min(max(wanted, FEWEST_BYTES), MOST_BYTES, free) // TENSORS // 4 * 4
    tensors = {f"layer.{number}": torch.randn(size // 4) for number in range(TENSORS)}
    rates: dict[str, float] = {}
    size *= TENSORS
    copies = [tensor.clone() for tensor in tensors.values()]  # so that no page is new to the kernel below
    with _timed(rates, "copy", size):
        for copy, tensor in zip(copies, tensors.values(), strict=True):
            copy.copy_(tensor)
    del copies
    with _timed(rates, "hash", size):
        digest_of(tensors.items())
    with (subject.folder / "plain").open("wb") as file, _timed(rates, "write", size):
        write_tensors(file, TensorStream.of(tensors), dict)
    (subject.folder / "plain").unlink()
    folder = FolderStore(subject.folder / "rates")
    with HttpStoreServer(folder.folder) as store:
        with _timed(rates, "publish", size):
            stored = store.put("selftest", 0, 0, tensors)
        with _timed(rates, "read", size):
            _drain(folder.read, str(folder.path(stored.version)))
        with _timed(rates, "http", size):
            _drain(HttpStore(store.token, subject.folder / "cache").read, stored.location)
    for name in ("rates", "cache"):
        shutil.rmtree(subject.folder / name)
    if rates["publish_gb_per_s"] < SLOWEST_SHARE * rates["copy_gb_per_s"]:
        raise Wrong(f"publishing has less than {SLOWEST_SHARE:.0%} of a copy's rate", size_bytes=size, **rates)
    return {"size_bytes": size, **rates}


def _drain(read: Callable[[str], Iterator[tuple[str, torch.Tensor]]], location: str) -> None:
    """As an engine reads: each byte is hashed."""
    digest_of(read(location))
