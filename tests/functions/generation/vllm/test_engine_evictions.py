"""Evictions of a real engine: prompt tokens that it had in its cache and computed again are counted as they happen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakes.tiny_models import VOCABULARY, make_tiny_model, tiny_settings
from rlhfless.functions.generation.engine import SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.prefixes.evicted import CachedBlocks
from rlhfless.prefixes.tree import CPU_BLOCK_TOKENS
from rlhfless.spec import EngineSpec

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.asyncio]

PROMPT_TOKENS = 900
FOUND_TOKENS = PROMPT_TOKENS // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
"""Of a prompt whose blocks are all there."""
SMALL = EngineSpec(kv_cache_gib=0.002, max_sequences=4)
"""Holds some 4,000 tokens: four prompts."""


async def test_blocks_that_were_given_away_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = make_tiny_model(tmp_path / "model", tied=True)
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(3, len(VOCABULARY), PROMPT_TOKENS).tolist()) for _ in range(12)]
    engine = await VllmEngine.start(tiny_settings(model, tmp_path, SMALL))
    known, evicted = CachedBlocks(CPU_BLOCK_TOKENS), []
    try:
        for number, prompt in enumerate([*prompts, prompts[-1], prompts[0], prompts[0]]):
            expected = known.add(prompt)
            request = SampleRequest(str(number), prompt, seed=1, max_tokens=1, temperature=1.0, cache_salt="v")
            evicted.append(expected - (await engine.sample(request)).cached_tokens)
    finally:
        await engine.stop()
    assert evicted == [0] * 12 + [0, FOUND_TOKENS, 0]
