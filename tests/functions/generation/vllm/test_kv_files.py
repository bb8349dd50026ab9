"""The KV of a prefix, from one real engine to another: the tokens that are not computed, and the same response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from fakes.tiny_models import VOCABULARY, make_tiny_model, tiny_settings
from rlhfless.functions.generation.engine import OFFER, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.prefixes.tree import CPU_BLOCK_TOKENS
from rlhfless.spec import EngineSpec

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

PREFIX_TOKENS = 512
CHUNKED = EngineSpec(kv_cache_gib=0.0625, max_sequences=64, max_batch_tokens=200)
"""Prefills the prefix in three iterations."""
APART = EngineSpec(kv_cache_gib=0.0625, max_sequences=64, core_process=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VllmEngine, VllmEngine, Path]]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    store = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        started = [
            await VllmEngine.start(replace(tiny_settings(model, store, spec), kv_connector="folder"))
            for spec in (CHUNKED, APART)
        ]
    yield started[0], started[1], store
    for engine in started:
        await engine.stop()
    assert not list(store.glob("kv-*"))


def prefix_of(seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, len(VOCABULARY), PREFIX_TOKENS).tolist())


def request(name: str, tokens: tuple[int, ...], salt: str, **changes: object) -> SampleRequest:
    asked = SampleRequest(name, tokens, seed=7, max_tokens=12, temperature=1.0, cache_salt=salt)
    return replace(asked, **changes)


@pytest.mark.parametrize("there", [False, True], ids=["computed for it", "computed before"])
async def test_a_prefix_is_moved(engines: tuple[VllmEngine, VllmEngine, Path], there: bool) -> None:
    source, target, _ = engines
    prefix = prefix_of(int(there))
    prompt, salt = (*prefix, 5, 6, 7), f"version {there}"
    if there:
        await source.sample(request("before", prompt, salt))
    given = await source.sample(request("offer", prefix, salt, max_tokens=1, kv_transfer=OFFER))
    assert given.cached_tokens == (PREFIX_TOKENS - CPU_BLOCK_TOKENS if there else 0)
    assert given.kv_offer is not None
    taken = await target.sample(request("take", prefix, salt, max_tokens=1, kv_transfer=given.kv_offer))
    assert taken.cached_tokens == PREFIX_TOKENS - CPU_BLOCK_TOKENS
    moved, computed = await asyncio.gather(
        target.sample(request("moved", prompt, salt)), source.sample(request("computed", prompt, f"other {salt}"))
    )
    assert (moved.cached_tokens, computed.cached_tokens) == (PREFIX_TOKENS, 0)
    assert moved.token_ids == computed.token_ids
    assert moved.logprobs == pytest.approx(computed.logprobs, abs=1e-5)


async def test_kv_of_other_weights_is_not_taken(engines: tuple[VllmEngine, VllmEngine, Path]) -> None:
    source, target, _ = engines
    given = await source.sample(request("offer", prefix_of(3), "old", max_tokens=1, kv_transfer=OFFER))
    taken = await target.sample(request("take", prefix_of(3), "new", max_tokens=1, kv_transfer=given.kv_offer))
    assert taken.cached_tokens == 0


async def test_an_offer_whose_files_are_gone_is_computed(engines: tuple[VllmEngine, VllmEngine, Path]) -> None:
    source, target, store = engines
    given = await source.sample(request("offer", prefix_of(4), "v", max_tokens=1, kv_transfer=OFFER))
    for file in store.glob("kv-*/*"):
        file.unlink()
    taken = await target.sample(request("take", prefix_of(4), "v", max_tokens=1, kv_transfer=given.kv_offer))
    assert taken.cached_tokens == 0
    assert len(taken.token_ids) == 1
