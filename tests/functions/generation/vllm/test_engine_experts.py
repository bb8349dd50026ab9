"""A real engine of a model with fused experts, against Hugging Face: loads reach the experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.tiny_models import PROBE_TOKENS, make_tiny_experts, perturbed, start_tiny_engine
from rlhfless.weights.check import PROBE_TOLERANCE, check_probe, largest_difference
from rlhfless.weights.store import FolderStore

pytestmark = [pytest.mark.engine, pytest.mark.long]


async def test_every_load_reaches_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU kernel has a packed copy of them, which it makes at the first load alone."""
    monkeypatch.setenv("RLHFLESS_HOME", str(tmp_path / "home"))
    model, store = make_tiny_experts(tmp_path / "model"), FolderStore(tmp_path / "store")
    engine = await start_tiny_engine(model, store.folder)
    try:
        for step in (1, 2):
            before = await engine.logprobs(PROBE_TOKENS)
            model.use(perturbed(model.tensors(), seed=step))
            published = model.publish(store.put("run", 1, step, model.tensors()))
            report = await engine.load(published)
            after = await engine.logprobs(PROBE_TOKENS)
            assert largest_difference(before, after) > PROBE_TOLERANCE["float32"]
            check_probe(published.version, published.probe, after, PROBE_TOLERANCE["float32"])
            assert largest_difference(after, published.probe.logprobs) < PROBE_TOLERANCE["float32"]
            # A packed copy cannot be read back; everything else is.
            experts = [name for name in model.tensors() if ".experts." in name]
            assert report is not None
            assert report.read_back == report.tensors - len(experts)
    finally:
        await engine.stop()
