"""Sleep and wake of an actor and of a learner, beside their start.

    python benchmarks/sleep.py [--models tiny,100M] [--cycles 50] [--smoke]

The actor: its engine draws until its KV cache is full, sleeps without its weights (`dropped`), wakes, and loads a
version, as between two steps in which functions take turns. The learner: one rank that has learned one step sleeps with
weights and moments in the host's memory. Both are on one CPU core; seconds are medians over the cycles.

given back   of what the function holds on its device (weights and KV; weights and moments): what its processes held
             less while it slept, by RssAnon of /proc
residue      what they hold more, asleep, after the last cycle than after the first
wake / start from asleep to serving a new version, over the engine's start: the ratio to the peer, a cold start
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from ranks import VOCABULARY, batch_of, random_model
from setting import engine_settings, spread
from smoke import parsed
from where import machine

from rlhfless.algorithms.passes import Passes
from rlhfless.functions.generation.engine import SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.parking import Parking, held_bytes
from rlhfless.records import Probe, PublishedWeights, SleepTier
from rlhfless.spec import AdamWSpec, EngineSpec, GRPOSpec, LearnerSpec, ModelSpec
from rlhfless.weights.store import FolderStore

LAYERS = {"tiny": 1, "100M": 12}
KV_GIB = 0.25
PROMPT_TOKENS, RESPONSE_TOKENS = 96, 32
MIB = 2**20
CPU = torch.device("cpu")


async def measure_actor(folder: Path, cycles: int) -> None:
    """A real engine in a process of its own."""
    model = str(folder / "model")
    store = FolderStore(folder / "store")
    rank = learner_of(model, folder)
    tensors = rank.weights()
    rank.close()
    engine = await VllmEngine.start(
        engine_settings(
            folder / "model",
            store.folder,
            max_model_len=2 * PROMPT_TOKENS,
            engine=EngineSpec(kv_cache_gib=KV_GIB, max_sequences=64),
        )
    )
    times: dict[str, list[float]] = {"sleep": [], "wake weights": [], "load": [], "wake KV": []}
    asleep_bytes, given_back = [], 0.0
    weights_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for cycle in range(cycles):
        if cycle < 2:  # a cache that was never written to holds no memory; in the second cycle all of it was
            await fill_cache(engine, cycle)
        started = time.perf_counter()
        slept = await engine.sleep(SleepTier.DROPPED)
        times["sleep"].append(time.perf_counter() - started)
        asleep_bytes.append(slept.held_bytes)
        if cycle == 1:
            given_back = slept.freed_bytes / (weights_bytes + KV_GIB * 2**30)
        next(iter(tensors.values())).view(-1)[0] = cycle  # another version
        stored = store.put("bench", 1, cycle, tensors)
        published = PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, Probe((), ()))
        for what, work in (
            ("wake weights", lambda: engine.wake("weights")),
            ("load", lambda published=published: engine.load(published)),
            ("wake KV", lambda: engine.wake("kv_cache")),
        ):
            started = time.perf_counter()
            await work()
            times[what].append(time.perf_counter() - started)
        store.retain({stored.version})
    up = [sum(parts) for parts in zip(times["wake weights"], times["load"], times["wake KV"], strict=True)]
    start_s = sum(engine.start_seconds.values())
    await engine.stop()
    for what, seconds in times.items():
        print(f"  actor: {what:14} {spread(seconds)} s")
    print(f"  actor: given back {given_back:.2f} of {weights_bytes / MIB:.0f} MiB of weights and {KV_GIB} GiB of KV")
    print(f"  actor: residue {(asleep_bytes[-1] - asleep_bytes[0]) / MIB:.1f} MiB after {cycles} cycles")
    print(f"  actor: wake / start {statistics.median(up) / start_s:.3f} (started in {start_s:.1f} s)")


async def fill_cache(engine: VllmEngine, round_: int) -> None:
    """Requests with prompts of their own, until every block has been written to."""
    count = engine.kv_capacity_tokens // PROMPT_TOKENS + 1
    generator = torch.Generator().manual_seed(round_)
    prompts = torch.randint(2, VOCABULARY, (count, PROMPT_TOKENS), generator=generator).tolist()
    requests = [
        SampleRequest(f"{round_}-{i}", tuple(prompt), seed=i, max_tokens=RESPONSE_TOKENS, temperature=1.0)
        for i, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*map(engine.sample, requests))


def learner_of(model: str, folder: Path) -> LearnerRank:
    return LearnerRank(
        ModelSpec(path=model),
        LearnerSpec(threads=1),
        AdamWSpec(learning_rate=1e-4),
        GRPOSpec(),
        1.0,
        rank=0,
        world_size=1,
        init_method=f"file://{folder / f'rendezvous-{time.monotonic_ns()}'}",
        timeout_s=600,
    )


def measure_learner(folder: Path, cycles: int) -> None:
    """A rank in this process."""
    rank = learner_of(str(folder / "model"), folder)
    rank.learn(batch_of(1), Passes())
    parking = Parking(rank.kept_on_device())
    times: dict[str, list[float]] = {"sleep": [], "wake": []}
    asleep_bytes, given_back = [], 0.0
    for _ in range(cycles):
        before = held_bytes(CPU)
        for what, work in (("sleep", parking.park), ("wake", parking.restore)):
            started = time.perf_counter()
            work()
            times[what].append(time.perf_counter() - started)
            if what == "sleep":
                asleep_bytes.append(held_bytes(CPU))
                given_back = (before - asleep_bytes[-1]) / parking.size_bytes
    rank.close()
    for what, seconds in times.items():
        print(f"  learner: {what:12} {spread(seconds)} s")
    print(f"  learner: given back {given_back:.2f} of {parking.size_bytes / MIB:.0f} MiB of weights and moments")
    print(f"  learner: residue {(asleep_bytes[-1] - asleep_bytes[0]) / MIB:.1f} MiB after {cycles} cycles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,100M")
    parser.add_argument("--cycles", type=int, default=50)
    arguments = parsed(parser, models="tiny", cycles=3)
    torch.set_num_threads(1)
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory(prefix="rlhfless-sleep-") as folder:
            random_model(Path(folder) / "model", LAYERS[name])
            save_tokenizer(Path(folder) / "model")
            print(name)
            measure_learner(Path(folder), arguments.cycles)
            asyncio.run(measure_actor(Path(folder), arguments.cycles))


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1}, "<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


if __name__ == "__main__":
    main()
