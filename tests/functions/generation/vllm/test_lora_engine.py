"""The real engine with adapters, against Hugging Face with their values merged: versions, slots, checks and repairs.

One engine for all tests, which run in the order of this file.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from fakes.adapted_models import RANK, TOLERANCE, Adapted, off, request
from fakes.tiny_models import PROBE_TOKENS, make_tiny_model, tiny_settings
from rlhfless.functions.generation.engine import AdapterSlots, EngineBusy
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import SleepTier, VersionSpan
from rlhfless.spec import EngineSpec
from rlhfless.weights.store import FolderStore

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    store = FolderStore(tmp_path_factory.mktemp("store"))
    # The KV cache is small, so that requests of a test get the blocks that those before them freed.
    settings = tiny_settings(model, store.folder, EngineSpec(kv_cache_gib=0.004, max_sequences=64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = await VllmEngine.start(replace(settings, adapters=AdapterSlots(RANK, SLOTS, ("*",))))
    yield Adapted(engine, model, store)
    await engine.stop()


async def test_an_adapter_of_zeros_is_the_base_to_the_last_bit(adapted: Adapted) -> None:
    before = await adapted.engine.logprobs(PROBE_TOKENS)
    plain = await adapted.engine.sample(request("plain"))
    await adapted.load(adapted.publish(0, adapted.tensors(1, scale=0.0)))
    assert await adapted.engine.logprobs(PROBE_TOKENS) == before
    zeros = await adapted.engine.sample(request("zeros"))
    assert (zeros.token_ids, zeros.logprobs) == (plain.token_ids, plain.logprobs)


async def test_versions(adapted: Adapted) -> None:
    for step in (1, 2, 3, 4, 5):
        tensors = adapted.tensors(step, targets=("_proj",) if step < 5 else ("q_proj", "down_proj"))
        published = adapted.publish(step, tensors)
        await adapted.load(published)
        sampled = await adapted.engine.sample(request("a"))
        assert sampled.version_spans == (VersionSpan(published.version.label, 0, len(sampled.token_ids)),)
        assert off(adapted.merged(tensors), sampled) < TOLERANCE
        assert off(adapted.model, sampled) > 100 * TOLERANCE


async def test_a_sample_is_the_same_to_the_last_bit_alone_and_beside_others(adapted: Adapted) -> None:
    alone = await adapted.engine.sample(request("alone", max_tokens=40))
    many = (adapted.engine.sample(request(f"n{number}", seed=11 + number, max_tokens=40)) for number in range(12))
    beside, *_ = await asyncio.gather(*many)
    assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs)


async def test_requests_in_flight_end_with_their_own_version(adapted: Adapted) -> None:
    versions = {step: adapted.tensors(step) for step in (6, 7)}
    await adapted.load(adapted.publish(6, versions[6]))
    names = [f"old{number}" for number in range(4)]
    long = {"max_tokens": 400, "stop_token_ids": ()}
    old = [asyncio.create_task(adapted.engine.sample(request(name, seed=n, **long))) for n, name in enumerate(names)]
    newer = adapted.publish(7, versions[7])
    while not all(adapted.engine.progress().get(name) for name in names) and not any(task.done() for task in old):
        await asyncio.sleep(0.01)
    if not any(task.done() for task in old):  # the engine can be much faster than this process on a busy machine
        with pytest.raises(EngineBusy):
            await adapted.engine.load(newer)
    await adapted.load(newer, in_flight=True)
    new = await adapted.engine.sample(request("new"))
    assert off(adapted.merged(versions[7]), new) < TOLERANCE
    await adapted.engine.abort(names[:1])
    for sampled in await asyncio.gather(*old):
        assert {span.version for span in sampled.version_spans} == {adapted.publish(6, versions[6]).version.label}
        assert off(adapted.merged(versions[6]), sampled) < 3 * TOLERANCE


async def test_all_slots_in_use(adapted: Adapted) -> None:
    tasks = []
    for step in range(8, 8 + SLOTS):
        await adapted.load(adapted.publish(step, adapted.tensors(step)), in_flight=True)
        name = f"at{step}"
        tasks.append(asyncio.create_task(adapted.engine.sample(request(name, max_tokens=900, seed=step))))
        while not adapted.engine.progress().get(name) and not tasks[-1].done():
            await asyncio.sleep(0.01)
    if sum(not task.done() for task in tasks) == SLOTS:
        with pytest.raises(EngineBusy, match="all 3 slots"):
            await adapted.engine.load(adapted.publish(20, adapted.tensors(20)), in_flight=True)
    await adapted.engine.abort()
    await asyncio.gather(*tasks)
    await adapted.load(adapted.publish(20, adapted.tensors(20)))


async def test_nan_of_one_version_does_not_reach_the_next(adapted: Adapted) -> None:
    """Blocks of the KV cache that hold infinity are used again. Without zeros, attention multiplies it by 0."""
    poison = adapted.tensors(30)
    name = next(name for name in poison if "v_proj.lora_B" in name)
    poison[name] = torch.full_like(poison[name], 1e38)  # finite, unlike its products
    await adapted.engine.load(adapted.publish(30, poison))
    names = [f"poison{number}" for number in range(16)]
    long = [adapted.engine.sample(request(name, seed=n, max_tokens=500)) for n, name in enumerate(names)]
    assert any(not math.isfinite(value) for each in await asyncio.gather(*long) for value in each.logprobs)
    tensors = adapted.tensors(31)
    await adapted.load(adapted.publish(31, tensors))
    after = [adapted.engine.sample(request(f"after{n}", seed=n, max_tokens=60)) for n in range(16)]
    model = adapted.merged(tensors)
    assert all(off(model, sampled) < TOLERANCE for sampled in await asyncio.gather(*after))


@pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DROPPED])
async def test_sleep(adapted: Adapted, tier: SleepTier) -> None:
    tensors = adapted.tensors(21)
    await adapted.load(adapted.publish(21 + (tier is SleepTier.DROPPED), tensors))
    await adapted.engine.sleep(tier)
    if tier is SleepTier.HOST:
        await adapted.engine.wake()
    else:
        await adapted.engine.wake("weights")
        report = await adapted.engine.load(adapted.publish(23, tensors))
        assert report is not None
        await adapted.engine.wake()
    assert off(adapted.merged(tensors), await adapted.engine.sample(request("awake"))) < TOLERANCE
