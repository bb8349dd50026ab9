"""Seconds from learned weights to engines that have them, computed from assumed rates: nothing is measured here. Pure.

    python benchmarks/weights_computed.py [--smoke]

It prints the table of docs/weights.md: each transport to one engine, for two models, as it was before (one file,
written by one thread at a time; copied to the GPU by one thread; GPU tensors hashed on the host) and as it is now
(files written in parallel; copied ahead by several threads; hashed on the GPU). What vLLM does after the copy, and the
learner's gather, are in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smoke import print_computed

from rlhfless.records.ledger import BUCKET_BYTES
from rlhfless.weights.digest import MOST_THREADS
from rlhfless.weights.files import READERS
from rlhfless.weights.parts import PARTS


@dataclass(frozen=True)
class Rates:
    """GB/s, but for seconds. Those without a note were seen on the H100 machine of docs/gpus.md."""

    write: float = 2.1
    """Of one thread, into pages of shared memory."""
    hash: float = 8.1
    """Of one thread, xxh3."""
    http: float = 1.3
    pageable: float = 5.0
    """Assumed: one worker's copy from mapped pages to its GPU (4 to 6)."""
    new_pages: float = 10.0
    """Assumed: what all threads together write into new pages of shared memory."""
    copy: float = 37.0
    """Of all threads together, from memory to memory; also what they hash at most."""
    network: float = 25.0
    """Assumed: NCCL between nodes, 200 Gbit/s."""
    gather: float = 150.0
    """Assumed: of a layer from all ranks, by NVLink."""
    device_copy: float = 1300.0
    """Assumed: from memory to memory of a GPU."""
    bucket_s: float = 1e-3
    """Assumed: seconds, for a rank and its engines to tell each other of a bucket."""
    device_hash: float = 200.0
    """Computed: 3.3 TB/s of device memory, at 80 %; 54 bytes are moved for each four (two products of 8 bytes written
    and read, two factors, the word itself)."""


RATES = Rates()


@dataclass(frozen=True)
class Model:
    """A model whose engines have `workers` GPUs each."""

    name: str
    gb: float
    workers: int


MODELS = (Model("7B", 15.2, 1), Model("32B", 65.5, 4))


def _publish_s(model: Model, parts: int) -> float:
    """The slower of threads that hash and then write, `parts` of them at a time, and the host's memory."""
    one = 1 / (1 / RATES.write + 1 / RATES.hash) if parts > 1 else RATES.write
    return model.gb / min(parts * one, RATES.new_pages)


def _read_rate(now: bool) -> float:
    """Of one GPU that reads from the host's memory: several threads read ahead now."""
    return min(READERS * RATES.pageable, RATES.copy) if now else RATES.pageable


def _copy_s(model: Model, now: bool) -> float:
    """Each worker copies its share of each tensor to its GPU; a single one copies ahead."""
    return model.gb / model.workers / _read_rate(now and model.workers == 1)


def _pulled_s(model: Model) -> float:
    return model.gb / RATES.http + model.gb / min(MOST_THREADS * RATES.hash, RATES.copy)


def shared_memory(model: Model, now: bool) -> float:
    """Published, and copied by each engine from the mapped version."""
    return _publish_s(model, PARTS if now else 1) + _copy_s(model, now)


def http(model: Model, now: bool) -> float:
    """The same on another node, which pulls and checks it first."""
    return shared_memory(model, now) + _pulled_s(model)


def nccl(model: Model, now: bool) -> float:
    """Published, read back on its way to all GPUs, and hashed there by each engine's workers, which share that."""
    hashing = model.gb / (RATES.device_hash if now else RATES.hash) / model.workers
    return _publish_s(model, PARTS if now else 1) + model.gb / min(_read_rate(now), RATES.network) + hashing


def cuda_ipc(model: Model, now: bool) -> float | None:
    """Before: hashed by the learner, by eight threads on a host, and by its engine, by one; all on one GPU. Now:
    gathered twice, for the digest and for the engines; hashed by the learner and by each engine's workers; copied to
    the bucket and from it."""
    if now:
        hashing = (1 + 1 / model.workers) * model.gb / RATES.device_hash
        copying = 2 * model.gb / RATES.device_copy + model.gb * 1e9 / BUCKET_BYTES * RATES.bucket_s
        return 2 * model.gb / RATES.gather + hashing + copying
    return model.gb / min(MOST_THREADS * RATES.hash, RATES.copy) + model.gb / RATES.hash if model.workers == 1 else None


WAYS: Mapping[str, Callable[[Model, bool], float | None]] = {
    "shared_memory": shared_memory,
    "http": http,
    "nccl": nccl,
    "cuda_ipc": cuda_ipc,
}


def table() -> str:
    """The table of docs/weights.md."""
    models = [f"{model.name}: before | now" for model in MODELS]
    lines = [f"| seconds (computed) | {' | '.join(models)} |", f"|{'---|' * (1 + 2 * len(MODELS))}"]
    for name, way in WAYS.items():
        cells = [_cell(way(model, now)) for model in MODELS for now in (False, True)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def main() -> None:
    print_computed(__doc__, table)


if __name__ == "__main__":
    main()
