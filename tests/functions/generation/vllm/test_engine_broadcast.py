"""One version broadcast to two real engines, with gloo in the place of NCCL; and a broadcast that breaks off."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.tiny_models import PROBE_TOKENS, SHAPES, TinyModel, loaded, make_tiny_model, tiny_settings
from rlhfless.functions.generation.engine import EngineDead
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.functions.learner.controller import StoreHome
from rlhfless.weights import broadcast
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.http import HttpStoreServer

ENGINES = 2


async def started(model: TinyModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = tiny_settings(model, cache, SHAPES["one process"])
    return await VllmEngine.start(replace(settings, store=StoreAddress("nccl", str(cache), "secret")))


@pytest.mark.engine
@pytest.mark.long
async def test_engines_load_what_is_broadcast_and_are_replaced_when_it_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model", tied=True)
    server = StoreHome(str(tmp_path / "store"), "secret", "nccl", ENGINES).open("127.0.0.1")
    assert isinstance(server, HttpStoreServer)
    starts = (started(model, tmp_path / f"cache-{number}", monkeypatch) for number in range(ENGINES))
    engines = await asyncio.gather(*starts)
    try:
        for step in (1, 2):
            _learn(model)
            published = model.publish(server.put("run", 1, step, model.tensors()))
            ways = await asyncio.gather(*(loaded(engine, published) for engine in engines))
            assert ways == ["nccl"] * ENGINES

        _learn(model)
        published = model.publish(server.put("run", 1, 3, model.tensors()))
        _break_off(monkeypatch)
        failures = await asyncio.gather(*(engine.load(published) for engine in engines), return_exceptions=True)
        assert [type(failure) for failure in failures] == [WeightFileError] * ENGINES
        for engine in engines:
            assert not engine.usable
            with pytest.raises(EngineDead):
                await engine.logprobs(PROBE_TOKENS)
            await engine.stop()

        engines = [await started(model, tmp_path / "cache-new", monkeypatch)]
        assert await loaded(engines[0], published) == "http", "a replacement comes alone, and pulls"
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))
        server.close()


@torch.no_grad()
def _learn(model: TinyModel) -> None:
    for parameter in model.model.parameters():
        parameter.mul_(1.01)


def _break_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner fails after the first part of the next broadcast."""
    monkeypatch.setattr(broadcast, "PACK_BYTES", 1000)
    send = broadcast._broadcast
    parts: list[int] = []

    def breaks_off(group: Any, data: torch.Tensor) -> None:
        parts.append(len(data))
        if len(parts) == 2:
            raise OSError("the GPU is gone")
        send(group, data)

    monkeypatch.setattr(broadcast, "_broadcast", breaks_off)
