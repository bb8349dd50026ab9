"""Families of mixtures of experts, from learner to engine: versions are loaded and checked, and routes match."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakes.expert_families import FAMILIES, K, save_family
from fakes.tiny_learner import make_rank
from fakes.tiny_models import CONTEXT_TOKENS, PROBE_TOKENS, VOCABULARY, TinyModel, save_tokenizer, start_tiny_engine
from rlhfless.algorithms.batch import pack
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.generation.engine import SampleRequest
from rlhfless.records import Group, Probe, Prompt, PublishedWeights, Rollout
from rlhfless.records.routes import name_of
from rlhfless.spec import AdamWSpec, EngineSpec, GRPOSpec
from rlhfless.weights.check import PROBE_TOLERANCE, check_probe, largest_difference
from rlhfless.weights.store import FolderStore

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPT = tuple(range(5, 45))


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_goes_from_learner_to_engine_and_back(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHFLESS_HOME", str(tmp_path / "home"))
    if family.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM imports it with Qwen3.5, also for the text part alone")
    if family == "gpt_oss":
        pytest.skip("that logprobs of vLLM's CPU kernels match is not shown yet")
    save_family(family, tmp_path / "model", vocabulary=len(VOCABULARY), context_tokens=CONTEXT_TOKENS)
    save_tokenizer(tmp_path / "model")
    routes, store = tmp_path / "routes", FolderStore(tmp_path / "store")
    model = TinyModel(tmp_path / "model", None)  # type: ignore[arg-type]
    engine = await start_tiny_engine(
        model, store.folder, EngineSpec(kv_cache_gib=0.25, max_sequences=8), routes_folder=str(routes)
    )
    options = {"optimizer": AdamWSpec(learning_rate=1e-2), "algorithm": GRPOSpec(router_replay="engine")}
    rank = make_rank(str(model.folder), tmp_path / "meet", temperature=1.0, routes_folder=str(routes), **options)
    try:
        for step in (1, 2):
            before = await engine.logprobs(PROBE_TOKENS)
            stream, samples = rank.published(PROBE_TOKENS)
            stored = store.put("run", 1, step, stream)
            probe = Probe(PROBE_TOKENS, rank.probe_logprobs(PROBE_TOKENS), samples)
            published = PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, probe)
            report = await engine.load(published)
            assert report is not None
            experts = [name for name in samples if ".experts." in name]
            # Besides packed experts, biases of routers are not read back: two layers share them, or kernels have them.
            others = [name for name in samples if name.endswith(("e_score_correction_bias", "router.bias"))]
            assert report.read_back >= report.tensors - len(experts) - len(others)
            after = await engine.logprobs(PROBE_TOKENS)
            check_probe(published.version, probe, after, PROBE_TOLERANCE["float32"])
            assert step == 1 or largest_difference(before, after) > PROBE_TOLERANCE["float32"]
            request = SampleRequest("r", PROMPT, seed=step, max_tokens=24, temperature=1.0, routes=name_of(step))
            sampled = await engine.sample(request)
            rollout = Rollout(
                "p", 0, step, np.asarray(sampled.token_ids), np.asarray(sampled.logprobs, np.float32), "",
                sampled.finish_reason, sampled.version_spans, "actor", 0.0, 0.0, routes=sampled.routes,
            )  # fmt: skip
            batch = pack([Group.of(Prompt("p", PROMPT, ""), [rollout])])
            old = rank.evaluate(batch)
            mask = batch.response_mask
            assert largest_difference(old[mask], batch.rollout_logprobs[mask]) < PROBE_TOLERANCE["float32"]
            assert np.load(routes / sampled.routes[0].file).shape[2] == K
            metrics = rank.learn(batch.with_columns(advantages=batch.spread(np.ones(1))), Passes())
            assert metrics["missing_routes"] == 0
            assert metrics["differing_routes"] < 0.05
    finally:
        rank.close()
        await engine.stop()
