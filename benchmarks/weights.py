"""Publishing and loading weights, beside a plain copy of the same bytes.

    python benchmarks/weights.py [--store-mb 200] [--engines tiny,mid] [--smoke]

Each figure is the median of several rounds. The copy is `Tensor.clone`, one thread: the fastest that bytes can
get from one place to another. `ratio` is a figure's rate divided by the copy's.

publish   digest, write, sync, rename          (FolderStore.put), in one file and in parts by turns
read      map and digest, no copy              (FolderStore.read)
load      the same inside a real engine, with packing for its kernels, and the prefix cache's reset
fetch     by another node, over HTTP and this machine's loopback, with a digest (HttpStore.read)
two       the same version to two nodes at once: each pulls it, or one broadcast, with gloo in the place of NCCL
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from setting import engine_settings
from smoke import parsed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from where import machine

from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import Probe, PublishedWeights
from rlhfless.spec import EngineSpec, Transport
from rlhfless.weights import parts
from rlhfless.weights.broadcast import Broadcaster, BroadcastReader
from rlhfless.weights.digest import Digest
from rlhfless.weights.http import HttpStore, HttpStoreServer
from rlhfless.weights.store import FolderStore, StoredWeights, WeightReader, WeightStore

ROUNDS = 7
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "vocab_size": 97},
    "mid": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 16, "vocab_size": 16384},
}


def _median_s(work: Callable[[int], object]) -> float:
    times = []
    for number in range(ROUNDS):
        started = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _row(what: str, size_bytes: int, seconds: float, copy_s: float) -> None:
    rate = size_bytes / seconds / 1e9
    print(
        f"{what:28} {size_bytes / 1e6:8.1f} MB {seconds * 1e3:9.2f} ms {rate:7.2f} GB/s  ratio {copy_s / seconds:.2f}"
    )


def _copy_s(tensors: dict[str, torch.Tensor]) -> float:
    return _median_s(lambda _: [tensor.clone() for tensor in tensors.values()])


def _next_version(tensors: dict[str, torch.Tensor], number: int) -> None:
    """Makes it a new version: publishing the same one again is a no-op."""
    next(iter(tensors.values())).view(-1)[0] = number


def _drop(store: WeightStore, keep: int = 0) -> None:
    """Delete all versions but the `keep` newest."""
    versions = store.versions()
    for version in versions[: len(versions) - keep]:
        store.delete(version)


def measure_store(store: FolderStore, size_mb: int) -> None:
    """Publish, in one file and in several by turns, and read without an engine."""
    tensors = {f"layer.{i}": torch.randn(size_mb * 250_000 // 16) for i in range(16)}
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    files = {parts.PARTS: store, 1: FolderStore(store.folder / "one")}
    publish_s: dict[int, list[float]] = {count: [] for count in files}

    def publish(number: int) -> None:
        for count, target in files.items():
            parts.PARTS = count
            _next_version(tensors, number)
            _drop(target)  # the next one is written over it
            started = time.perf_counter()
            target.put("bench", 0, number, tensors)
            publish_s[count].append(time.perf_counter() - started)

    def read(_: int) -> None:
        digest = Digest()
        for _name, _tensor in digest.passing(store.read(str(store.path(store.versions()[-1])))):
            pass

    copy_s = _copy_s(tensors)
    _row("store: copy", size_bytes, copy_s, copy_s)
    for number in range(ROUNDS):
        publish(number)
    for count, seconds in publish_s.items():
        _row(f"store: publish, {count} files", size_bytes, statistics.median(seconds), copy_s)
    parts.PARTS = max(files)
    _drop(files[1])
    _row("store: read", size_bytes, _median_s(read), copy_s)
    _drop(store)


def measure_fetch(folder: Path, size_mb: int) -> None:
    """Another node's fetch of a version."""
    random = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(size_mb * 500_000 // 16, generator=random).bfloat16() for i in range(16)}
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    copy_s = _copy_s(tensors)
    times = []
    with HttpStoreServer(folder / "served") as server:
        for number in range(ROUNDS):
            reader = HttpStore(server.token, folder / f"cache-{number}")
            stored = server.put("bench", 0, number, tensors)
            started = time.perf_counter()
            _fetch(reader, stored)
            times.append(time.perf_counter() - started)
            _drop(server)
            shutil.rmtree(folder / f"cache-{number}")
    _row("fetch", size_bytes, statistics.median(times), copy_s)


def measure_two(folder: Path, size_mb: int) -> None:
    """A version to two nodes, with a digest on each, by both ways in turn."""
    tensors = {f"layer.{i}": torch.randn(size_mb * 250_000 // 16) for i in range(16)}
    copy_s = _copy_s(tensors)
    join = Broadcaster(folder / "two", "127.0.0.1", 2).join
    times: dict[Transport, list[float]] = {"http": [], "nccl": []}
    with HttpStoreServer(folder / "two", join=join) as server, ThreadPoolExecutor(2) as pool:
        members = [BroadcastReader(HttpStore(server.token, folder / f"member-{node}")) for node in range(2)]
        for number in range(2 * ROUNDS):
            _next_version(tensors, number)
            stored = server.put("bench", 0, number, tensors)
            _drop(server, keep=1)
            pulling = [HttpStore(server.token, folder / f"node-{node}") for node in range(2)]
            readers: Sequence[WeightReader] = members if number % 2 else pulling
            started = time.perf_counter()
            ((digest, way),) = set(pool.map(partial(_received, stored=stored), readers))
            times[way].append(time.perf_counter() - started)
            assert digest == stored.version.digest
        for transport, seconds in times.items():
            _row(f"two: {transport}", stored.size_bytes, statistics.median(seconds), copy_s)


def _received(reader: WeightReader, stored: StoredWeights) -> tuple[str, Transport]:
    digest = Digest(reader.of_piece)
    for _ in digest.passing(reader.read(stored.location), reader.hashes(stored.location)):
        pass
    way = reader.transport
    reader.release()
    return digest.hexdigest(), way


def _fetch(reader: HttpStore, stored: StoredWeights) -> None:
    assert sum(tensor.nbytes for _, tensor in reader.read(stored.location)) > 0


def _make_model(name: str, folder: Path) -> dict[str, torch.Tensor]:
    config = Qwen2Config(
        **MODELS[name],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    words = {"<eos>": 0, "<unk>": 1}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


async def measure_engine(name: str, store: FolderStore, folder: Path) -> None:
    """Publish and load into a real CPU engine, float32."""
    tensors = _make_model(name, folder)
    engine = await VllmEngine.start(engine_settings(folder, store.folder, engine=EngineSpec(kv_cache_gib=0.125)))
    publish_s, load_s = [], []
    for number in range(ROUNDS):
        _next_version(tensors, number)
        started = time.perf_counter()
        stored = store.put(name, 0, number, tensors)
        published = time.perf_counter()
        await engine.load(
            PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, Probe((), ()))
        )
        load_s.append(time.perf_counter() - published)
        publish_s.append(published - started)
        _drop(store, keep=1)
    started_s = sum(engine.start_seconds.values())
    await engine.stop()
    copy_s = _copy_s(tensors)
    parameters = sum(tensor.numel() for tensor in tensors.values()) / 1e6
    print(f"{name}: {parameters:.1f} M parameters, engine up in {started_s:.1f} s")
    _row(f"{name}: copy", stored.size_bytes, copy_s, copy_s)
    _row(f"{name}: publish", stored.size_bytes, statistics.median(publish_s), copy_s)
    _row(f"{name}: load", stored.size_bytes, statistics.median(load_s), copy_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store-mb", type=int, default=200, help="size of the synthetic weights")
    parser.add_argument("--engines", default="tiny,mid", help="models to load into an engine; empty for none")
    parser.add_argument("--folder", default="/dev/shm", help="where the store is made")
    arguments = parsed(parser, store_mb=4, engines="tiny")
    torch.set_num_threads(1)
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}, {arguments.folder}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        store = FolderStore(Path(folder) / "store")
        measure_store(store, arguments.store_mb)
        measure_fetch(Path(folder), arguments.store_mb)
        measure_two(Path(folder), arguments.store_mb)
        for name in filter(None, arguments.engines.split(",")):
            asyncio.run(measure_engine(name, store, Path(folder) / name))


if __name__ == "__main__":
    main()
