"""The real engine with adapters of several runs: each run as if it were alone, whatever the others do.

One engine for all tests, which run in the order of this file. The KV cache is small, so that requests of a run get the
blocks that those of the others freed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from fakes.adapted_models import RANK, TOLERANCE, Adapted, off, request
from fakes.tiny_models import PROBE_TOKENS, make_tiny_model, tiny_settings
from rlhfless.functions.generation.engine import AdapterSlots, EngineBusy, EngineError, Sampled
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import PublishedWeights
from rlhfless.spec import EngineSpec
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import WeightCheckFailed, WeightFileError, check_probe
from rlhfless.weights.store import FolderStore

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

RUNS, SLOTS = 4, 12
Tensors = Mapping[str, torch.Tensor]


async def start(folder: Path, *, core_process: bool = False) -> Adapted:
    for name in ("model", "store", "own"):
        (folder / name).mkdir(mode=0o700)
    model = make_tiny_model(folder / "model", tied=True)
    spec = EngineSpec(kv_cache_gib=0.004, max_sequences=64, core_process=core_process)
    settings = tiny_settings(model, folder / "own", spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        slots = AdapterSlots(2 * RANK, SLOTS, ("*",), RUNS)
        engine = await VllmEngine.start(replace(settings, adapters=slots))
    return Adapted(engine, model, FolderStore(folder / "store"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    adapted = await start(tmp_path_factory.mktemp("shared"))
    yield adapted
    await adapted.engine.stop()


async def load(shared: Adapted, published: PublishedWeights, **options: Any) -> None:
    """Load a run's version from the run's own store, with all checks."""
    store = StoreAddress("file", str(shared.store.folder))
    report = await shared.engine.load(published, store=store, **options)
    assert report is not None
    assert report.read_back == report.tensors == published.tensors
    logprobs = await shared.engine.logprobs(PROBE_TOKENS, published.version.run_id)
    check_probe(published.version, published.probe, logprobs, TOLERANCE)


async def drawn(shared: Adapted, run_id: str, count: int = 6, tokens: int = 60) -> list[Sampled]:
    requests = (request(f"{run_id}-{n}", seed=n, max_tokens=tokens, run_id=run_id) for n in range(count))
    return list(await asyncio.gather(*map(shared.engine.sample, requests)))


def same(first: list[Sampled], second: list[Sampled]) -> bool:
    return [(each.token_ids, each.logprobs) for each in first] == [(each.token_ids, each.logprobs) for each in second]


async def test_a_run_without_an_adapter_gets_no_base_model(shared: Adapted) -> None:
    with pytest.raises(EngineError, match="run a has no adapter here"):
        await drawn(shared, "a", 1)


async def test_runs_generate_with_their_own_adapters_as_if_alone(shared: Adapted) -> None:
    tensors = {run_id: shared.tensors(seed) for seed, run_id in enumerate("abc", 1)}
    await load(shared, shared.publish(1, tensors["a"], "a"))
    alone = await drawn(shared, "a")
    for run_id in "bc":
        await load(shared, shared.publish(1, tensors[run_id], run_id))
    together = dict(zip("abc", await asyncio.gather(*(drawn(shared, run_id) for run_id in "abc")), strict=True))
    assert same(together["a"], alone)
    for run_id, samples in together.items():
        model = shared.merged(dict(tensors[run_id]))
        assert all(off(model, sampled) < TOLERANCE for sampled in samples)
    assert all(off(shared.merged(dict(tensors["b"])), sampled) > 100 * TOLERANCE for sampled in together["a"])


async def test_versions_of_one_run_come_and_go_at_every_few_tokens_of_another(shared: Adapted) -> None:
    alone = await drawn(shared, "a", 4, 200)
    beside = asyncio.create_task(drawn(shared, "a", 4, 200))
    step = 2
    while not beside.done() and step < 40:
        await load(shared, shared.publish(step, shared.tensors(step), "b"))
        step += 1
    assert same(await beside, alone)


async def test_nan_of_one_run_reaches_no_other_during_or_after(shared: Adapted) -> None:
    poison = shared.tensors(30)
    name = next(name for name in poison if "v_proj.lora_B" in name)
    poison[name] = torch.full_like(poison[name], 1e38)  # finite, unlike its products
    alone = await drawn(shared, "a")
    store = StoreAddress("file", str(shared.store.folder))
    await shared.engine.load(shared.publish(50, poison, "b"), store=store)
    beside, poisoned = await asyncio.gather(drawn(shared, "a"), drawn(shared, "b", 16, 300))
    assert any(not math.isfinite(value) for each in poisoned for value in each.logprobs)
    assert same(beside, alone)
    assert same(await drawn(shared, "a", 6), alone), "in the blocks that it has freed"


async def test_a_failed_load_leaves_the_others_and_the_run_itself_alone(shared: Adapted, tmp_path: Path) -> None:
    alone, at_work = await drawn(shared, "a"), asyncio.create_task(drawn(shared, "c", 4, 300))
    store = StoreAddress("file", str(shared.store.folder))
    good = shared.publish(60, shared.tensors(60), "b")

    torn = shared.publish(61, shared.tensors(61), "b")
    files = [each for each in Path(torn.location).rglob("*") if each.is_file()]
    file = max(files, key=lambda each: each.stat().st_size)
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:1000])
    other_base = shared.publish(62, shared.tensors(62), "b", base="0b" * 16)
    wide = {name: torch.zeros(4 * RANK, value.shape[1]) if "lora_A" in name else torch.zeros(value.shape[0], 4 * RANK)
            for name, value in shared.tensors(63).items()}  # fmt: skip
    values = dict(shared.tensors(64))
    swapped = replace(shared.publish(64, values, "b"), probe=good.probe)  # other values than those announced
    for published, error, text in (
        (torn, WeightFileError, "."),
        (other_base, WeightCheckFailed, "for other runs"),
        (shared.publish(63, wide, "b"), EngineError, "has rank 16, and the engine's slots have rank 8"),
        (swapped, WeightCheckFailed, "read_back"),
        (replace(good, location=str(tmp_path / "nowhere")), Exception, "."),
    ):
        with pytest.raises(error, match=text):
            await shared.engine.load(published, store=store)
        assert shared.engine.usable
    await load(shared, good)
    assert same(await drawn(shared, "a"), alone)
    assert all(math.isfinite(value) for each in await at_work for value in each.logprobs)


async def test_a_run_that_uses_all_of_its_slots_takes_none_of_the_others(shared: Adapted) -> None:
    tasks = []
    for step in range(70, 70 + SLOTS // RUNS):
        await load(shared, shared.publish(step, shared.tensors(step), "b"), in_flight=True)
        name = f"at{step}"
        tasks.append(asyncio.create_task(shared.engine.sample(request(name, max_tokens=900, seed=step, run_id="b"))))
        while not shared.engine.progress().get(name) and not tasks[-1].done():
            await asyncio.sleep(0.01)
    if not any(task.done() for task in tasks):
        with pytest.raises(EngineBusy, match="all 3 slots"):
            await load(shared, shared.publish(80, shared.tensors(80), "b"), in_flight=True)
    await load(shared, shared.publish(80, shared.tensors(80), "d"))
    await shared.engine.abort([f"at{step}" for step in range(70, 70 + SLOTS // RUNS)])
    await asyncio.gather(*tasks)


async def test_the_time_is_split_among_the_runs(shared: Adapted) -> None:
    before = dict(shared.engine.shares)
    began_s = asyncio.get_running_loop().time()
    await asyncio.gather(drawn(shared, "a", 4, 100), drawn(shared, "c", 12, 100))
    took_s = asyncio.get_running_loop().time() - began_s
    used = {run_id: shared.engine.shares[run_id] - before[run_id] for run_id in "ac"}
    assert 0 < used["a"] < used["c"]
    assert sum(used.values()) <= took_s


async def test_a_run_that_leaves_frees_its_slots(shared: Adapted) -> None:
    alone = await drawn(shared, "a")
    for run_id in "bcd":
        await shared.engine.leave(run_id)
    with pytest.raises(EngineError, match="has no adapter"):
        await drawn(shared, "b", 1)
    await load(shared, shared.publish(90, shared.tensors(90), "e"))
    assert same(await drawn(shared, "a"), alone)


async def test_an_engine_whose_core_is_a_process_of_its_own(tmp_path: Path) -> None:
    apart = await start(tmp_path, core_process=True)
    try:
        tensors = {run_id: apart.tensors(seed) for seed, run_id in enumerate("ab", 1)}
        for run_id in "ab":
            await load(apart, apart.publish(1, tensors[run_id], run_id))
        for run_id, samples in zip("ab", await asyncio.gather(drawn(apart, "a"), drawn(apart, "b", 12)), strict=True):
            model = apart.merged(dict(tensors[run_id]))
            assert all(off(model, sampled) < TOLERANCE for sampled in samples)
        assert 0 < apart.engine.shares["a"] < apart.engine.shares["b"]
        await apart.engine.leave("a")
        with pytest.raises(EngineError, match="has no adapter"):
            await drawn(apart, "a", 1)
    finally:
        await apart.engine.stop()
