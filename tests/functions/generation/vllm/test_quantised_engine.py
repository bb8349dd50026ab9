"""The real engine in 8 bits, beside a learner that is not: what is loaded, read back, probed and drawn."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.tiny_models import PROBE_TOKENS, make_tiny_model, perturbed, start_tiny_engine
from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import Probe, PublishedWeights, SleepTier
from rlhfless.spec import SpeculationSpec
from rlhfless.weights.check import (
    WeightCheckFailed,
    check_probe,
    default_tolerance,
    largest_difference,
    mean_difference,
)
from rlhfless.weights.store import FolderStore

pytestmark = pytest.mark.engine

STALE = "model.layers.1.mlp.down_proj.weight"


def request(name: str, prompt: tuple[int, ...] = tuple(range(5, 90)), seed: int = 11) -> SampleRequest:
    return SampleRequest(name, prompt, seed=seed, max_tokens=24, temperature=1.0)


async def samples_are_the_same(engine: VllmEngine) -> Sampled:
    """Alone, together, with a cached prefix, and with drafts, which are right from the second on."""
    alone = await engine.sample(request("alone"))
    again = await engine.sample(replace(request("again"), earlier=(alone.token_ids,)))
    drawn = await asyncio.gather(*(engine.sample(request(f"r{seed}", seed=seed)) for seed in (11, 12, 13)))
    assert alone.token_ids == again.token_ids == drawn[0].token_ids
    assert alone.logprobs == pytest.approx(again.logprobs, abs=1e-4)
    assert again.cached_tokens > 0
    assert sum(again.accepted) > 0
    assert len({each.token_ids for each in drawn}) == 3
    return alone


async def test_an_engine_in_fp8(learner: Callable[..., Any], tmp_path: Path) -> None:
    """One engine for all, because a start takes ten seconds of a processor."""
    model = make_tiny_model(tmp_path / "model", tied=True)
    store = FolderStore(tmp_path / "store")
    tolerance = default_tolerance("float32", 2, "fp8")
    drafts = SpeculationSpec(method="suffix", depth=4)  # of depth `auto` the first passes are without drafts
    engine = await start_tiny_engine(model, store.folder, speculation=drafts, quantization="fp8")
    try:
        before = await engine.logprobs(PROBE_TOKENS)
        tensors = perturbed(model.tensors(), seed=1)
        model.use(tensors)
        published = model.publish(store.put("run", 1, 1, tensors))
        # The learner's own answer rounds to codes as the engine does; the one of its masters is further away.
        model.model.save_pretrained(model.folder)
        with learner(str(model.folder), quantization="fp8") as rank:
            rounded = Probe(PROBE_TOKENS, rank.probe_logprobs(PROBE_TOKENS), published.probe.samples)
        report = await engine.load(published)
        assert report is not None
        assert report.read_back == report.tensors == published.tensors  # all of them, those in codes too
        after = await engine.logprobs(PROBE_TOKENS)
        assert largest_difference(before, after) > tolerance
        check_probe(published.version, rounded, after, tolerance)
        near, far = (mean_difference(after, each.logprobs) for each in (rounded, published.probe))
        assert near < far / 2
        assert largest_difference(after, published.probe.logprobs) > 1e-3  # products of 16 bits would be within 1e-5

        alone = await samples_are_the_same(engine)

        # Weights of an earlier version: the probe tells. One earlier tensor: see below.
        newer = perturbed(tensors, seed=2)
        model.use(newer)
        told = model.publish(store.put("run", 1, 2, newer)).probe
        stored = store.put("run", 1, 3, newer | {STALE: tensors[STALE]})
        wrong = PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, told)
        with pytest.raises(WeightCheckFailed, match="`probe`"):
            check_probe(wrong.version, told, after, tolerance)

        # Asleep and back: what was dropped comes with the next load.
        await engine.sleep(SleepTier.DROPPED)
        await engine.wake()
        model.use(tensors)
        report = await engine.load(published)
        assert report is not None
        assert report.read_back == published.tensors
        assert (await engine.sample(request("awake"))).token_ids == alone.token_ids
        assert (await engine.sample(request("other", seed=12))).token_ids != alone.token_ids
        with pytest.raises(WeightCheckFailed, match=STALE) as caught:
            await engine.load(wrong)
        assert caught.value.check == "read_back"
    finally:
        await engine.stop()
