"""Without our repair a tied head stays stale on CPU: all bytes arrive, and the output is still wrong."""

from pathlib import Path

import pytest

from fakes.tiny_models import PROBE_TOKENS, make_tiny_model, perturbed, start_tiny_engine
from rlhfless.functions.generation.vllm import adapter
from rlhfless.weights.check import PROBE_TOLERANCE, WeightCheckFailed, check_probe
from rlhfless.weights.store import FolderStore


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.seldom
async def test_a_stale_head_passes_the_digest_and_fails_the_probe_and_the_read_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "_MODULE", "fakes.stale_head_loop")
    model = make_tiny_model(tmp_path / "model", tied=True)
    store = FolderStore(tmp_path / "store")
    engine = await start_tiny_engine(model, store.folder)
    try:
        tensors = perturbed(model.tensors(), seed=1)
        model.use(tensors)
        published = model.publish(store.put("run", 1, 1, tensors), samples=False)
        report = await engine.load(published)
        assert report is not None
        assert report.digest == published.version.digest  # the first check sees nothing
        after = await engine.logprobs(PROBE_TOKENS)
        # Even bfloat16's wide tolerance finds it.
        for tolerance in PROBE_TOLERANCE.values():
            with pytest.raises(WeightCheckFailed) as caught:
                check_probe(published.version, published.probe, after, tolerance)
            assert caught.value.check == "probe"
        sampled = model.publish(store.put("run", 1, 2, tensors))
        with pytest.raises(WeightCheckFailed, match=r"of 'model.embed_tokens.weight' are not the learner's") as caught:
            await engine.load(sampled)
        assert caught.value.check == "read_back"
    finally:
        await engine.stop()
