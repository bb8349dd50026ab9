"""A rank's bucket to two real engines, with a file in shared memory in the place of a GPU's; and half a version."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.tiny_models import SHAPES, TinyModel, loaded, make_tiny_model, tiny_settings
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.functions.learner.controller import StoreHome
from rlhfless.records import PublishedWeights
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.buckets import BucketStore
from rlhfless.weights.files import TensorStream

ENGINES = 2


async def started(model: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = tiny_settings(model, folder, SHAPES["one process"])
    return await VllmEngine.start(replace(settings, store=StoreAddress("cuda_ipc", str(folder))))


@pytest.mark.engine
@pytest.mark.long
async def test_engines_load_what_a_rank_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", tied=True)
    store = StoreHome(str(tmp_path / "store"), transport="cuda_ipc").open("127.0.0.1")
    assert isinstance(store, BucketStore)
    engines = await asyncio.gather(*(started(model, tmp_path / "store", monkeypatch) for _ in range(ENGINES)))

    def feed(published: PublishedWeights, tensors: dict[str, torch.Tensor]) -> Any:
        return asyncio.to_thread(store.feed, published.version, ENGINES, TensorStream.of(tensors))

    try:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.mul_(1.01)
            published = model.publish(store.put("run", 1, step, model.tensors()))
            fed, *ways = await asyncio.gather(
                feed(published, model.tensors()), *(loaded(engine, published) for engine in engines)
            )
            assert (fed, ways) == (ENGINES, ["cuda_ipc"] * ENGINES)
        short = dict(list(model.tensors().items())[:3])
        published = model.publish(store.put("run", 1, 3, model.tensors()))
        fed, *failures = await asyncio.gather(
            feed(published, short), *(engine.load(published) for engine in engines), return_exceptions=True
        )
        assert len(failures) == ENGINES
        assert all(isinstance(failure, Exception) for failure in failures), "half a version is never served"
        assert not any(engine.usable for engine in engines)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))
