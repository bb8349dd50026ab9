"""The adapter and its process, with a fake engine in it: waits end, deaths are noticed, ids stay apart."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlhfless.fleet.cluster import innermost
from rlhfless.functions.devices import engine_fault
from rlhfless.functions.generation.engine import (
    EngineDead,
    EngineError,
    EngineSettings,
    EngineTimeout,
    SampleRequest,
)
from rlhfless.functions.generation.vllm import adapter
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import FinishReason, Probe, PublishedWeights, WeightVersion
from rlhfless.spec import EngineSpec, TimeoutsSpec
from rlhfless.weights.address import StoreAddress

SETTINGS = EngineSettings(
    model="model",
    tokenizer="model",
    dtype="float32",
    max_model_len=None,
    seed=0,
    trust_remote_code=False,
    device="cpu",
    store=StoreAddress("file", "store"),
    engine=EngineSpec(),
    timeouts=TimeoutsSpec(start_s=30, drain_s=5),
)


def _request(name: str, max_tokens: int) -> SampleRequest:
    return SampleRequest(name, (1, 2), seed=0, max_tokens=max_tokens, temperature=1.0)


def _published(location: str, step: int = 1) -> PublishedWeights:
    return PublishedWeights(WeightVersion("run", 0, step, "00"), location, 8, 2, Probe((), ()))


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited 60 s in vain"
        await asyncio.sleep(0.01)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmEngine]:
    monkeypatch.setattr(adapter, "_MODULE", "fakes.fake_engine")
    engine = await VllmEngine.start(SETTINGS)
    yield engine
    await engine.stop()


async def test_many_requests_at_the_same_time(engine: VllmEngine) -> None:
    lengths = range(1, 40)
    answers = await asyncio.gather(*(engine.sample(_request(f"r{n}", n)) for n in lengths))
    assert [answer.request_id for answer in answers] == [f"r{n}" for n in lengths]
    assert [len(answer.token_ids) for answer in answers] == list(lengths)
    assert engine.progress() == {}


async def test_abort_returns_what_was_drawn(engine: VllmEngine) -> None:
    running = [asyncio.create_task(engine.sample(_request(name, 900_000))) for name in ("a", "b")]
    await _until(lambda: len(engine.progress()) == 2 and all(engine.progress().values()))
    await engine.abort(["a", "unknown"])
    aborted = await running[0]
    assert aborted.finish_reason is FinishReason.ABORT
    assert len(aborted.token_ids) > 0
    assert set(engine.progress()) == {"b"}
    await engine.abort()
    assert (await running[1]).finish_reason is FinishReason.ABORT


async def test_a_cancelled_caller_cancels_its_request(engine: VllmEngine) -> None:
    running = asyncio.create_task(engine.sample(_request("a", 900_000)))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # The id is free again, in the adapter and in the engine.
    assert len((await engine.sample(_request("a", 3))).token_ids) == 3


async def test_an_id_in_flight_is_refused(engine: VllmEngine) -> None:
    running = asyncio.create_task(engine.sample(_request("a", 900_000)))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="'a' is in flight"):
        await engine.sample(_request("a", 1))
    await engine.abort()
    await running


async def test_a_refused_request_harms_no_other(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="too long"):
        await engine.sample(_request("a", 2_000_000))
    assert len((await engine.sample(_request("b", 2))).token_ids) == 2


async def test_load_is_idempotent(engine: VllmEngine) -> None:
    published = _published("ok")
    report = await engine.load(published)
    assert report is not None
    assert report.digest == published.version.digest
    assert engine.loaded == published.version
    assert await engine.load(published) is None
    assert await engine.load(_published("ok", step=2)) is not None
    assert await engine.logprobs((1, 2, 3)) == (-2.0, -3.0)


async def test_a_failed_load_makes_the_engine_unusable(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="no such layer"):
        await engine.load(_published("fail"))
    assert not engine.usable
    assert engine.loaded is None
    with pytest.raises(EngineDead, match="loading run/0/1/00 failed"):
        await engine.sample(_request("a", 1))


async def test_a_load_that_hangs_ends(engine: VllmEngine) -> None:
    engine.settings = replace(SETTINGS, timeouts=TimeoutsSpec(sync_s=0.2, drain_s=0.2))
    with pytest.raises(EngineTimeout, match=r"`load` within 0.2 s"):
        await engine.load(_published("hang"))
    assert not engine.usable
    await engine.stop()  # does not wait for the hanging load
    assert engine._process.returncode == -signal.SIGKILL


async def test_the_death_of_the_process_ends_every_wait(engine: VllmEngine) -> None:
    waiting = asyncio.create_task(engine.sample(_request("a", 900_000)))
    await asyncio.sleep(0.05)
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="exit code -9"):
        await waiting
    with pytest.raises(EngineDead, match="exit code -9"):
        await engine.abort()


async def test_a_process_that_exits_in_a_call(engine: VllmEngine) -> None:
    with pytest.raises(EngineDead, match="exit code 3"):
        await engine.load(_published("die"))


async def test_a_start_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_MODULE", "fakes.fake_engine")
    monkeypatch.setenv("RLHFLESS_TEST_SLOW_START", "1")
    with pytest.raises(EngineTimeout, match=r"(?s)`start` within 3 s\n.* ends with:\n    INFO .* Free memory"):
        await VllmEngine.start(replace(SETTINGS, timeouts=TimeoutsSpec(start_s=3, drain_s=60)))


async def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_MODULE", "no_such_module")
    with pytest.raises(EngineDead, match="exit code 1"):
        await VllmEngine.start(SETTINGS)


async def test_a_failed_start_is_told_with_the_last_lines_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's core is a process of its own on GPUs: the cause is what it printed, and not in the trace."""
    monkeypatch.setattr(adapter, "_MODULE", "fakes.fake_engine")
    monkeypatch.setenv("RLHFLESS_TEST_FAILED_START", "1")
    log = tmp_path / "generation-0.log"
    with pytest.raises(EngineDead) as ended:
        await VllmEngine.start(SETTINGS, log)
    told = str(ended.value)
    trace, _, last = told.partition(f"errors in the engine's log, {log}:\n")
    assert trace.rstrip().endswith("RuntimeError: Engine core initialization failed. See root cause above.")
    assert last.startswith("    torch.OutOfMemoryError: CUDA out of memory\n")
    assert "RuntimeError" not in last  # it is in the trace
    assert "CUDA out of memory" in log.read_text()
    assert "CUDA out of memory" in innermost([f"rlhfless.x.EngineDead: {told}"]).message
    assert "CUDA out of memory" in str(engine_fault(told, {}))


async def test_an_engine_that_dies_later_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(adapter, "_MODULE", "fakes.fake_engine")
    engine = await VllmEngine.start(SETTINGS, tmp_path / "0.log")
    with pytest.raises(EngineDead, match=rf"exit code 3; its log is {tmp_path}/0.log"):
        await engine.load(_published("die"))
    assert "Free memory on device" in (tmp_path / "0.log").read_text()


async def test_the_process_ends_with_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_MODULE", "fakes.fake_engine")
    engine = await VllmEngine.start(SETTINGS)
    engine._writer.close()  # as when the adapter's process dies
    await _until(lambda: engine._process.poll() is not None)
    assert engine._process.returncode == 0


async def test_silence_during_a_load_in_flight_is_no_hang(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process sends nothing while it loads; a load of 32B over HTTP takes longer than a heartbeat."""
    running = asyncio.create_task(engine.sample(_request("a", 900_000)))
    await _until(lambda: engine.progress().get("a", 0) > 0)
    loading = asyncio.create_task(engine.load(_published("slow"), in_flight=True))
    await asyncio.sleep(0.5)
    assert not loading.done()
    engine.require_heartbeat(0.2)
    assert await loading is not None
    engine.require_heartbeat(0.2)
    monkeypatch.setattr(engine, "_heard_s", time.monotonic() - 1)
    with pytest.raises(EngineDead, match="silent for 1 s"):
        engine.require_heartbeat(0.2)
    with pytest.raises(EngineDead):
        await running
