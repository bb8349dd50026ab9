"""Run one vLLM engine behind an asynchronous interface that exposes nothing of vLLM.

The engine is a separate process (`loop`): a crash or hang in native code cannot take the caller down and can be
killed, and the caller answers health checks while the engine computes. Only requests, finished responses and
progress heartbeats cross the process boundary, never single tokens. Processes that vLLM starts belong to the
engine's session and end with it, so none holds a device afterwards.

Invariants: every wait is bounded by `EngineSettings.timeouts`. After a failed load, a lost process or a timed-out
call, `usable` stays False, and every call raises `EngineDead`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

from rlhfless.functions.generation.engine import (
    ENGINE_PARTS,
    EngineBusy,
    EngineDead,
    EngineError,
    EnginePart,
    EngineSettings,
    EngineTimeout,
    LoadReport,
    Rest,
    Sampled,
    SampleRequest,
)
from rlhfless.functions.generation.engine_log import errors_and_end
from rlhfless.functions.generation.vllm.arguments import engine_environment, require_supported_vllm
from rlhfless.functions.generation.vllm.messages import (
    CORE_DIED,
    Answer,
    Crashed,
    EngineCall,
    EngineProgress,
    Finished,
    Refused,
    Returned,
    Started,
    Stop,
    Submit,
)
from rlhfless.records import PublishedWeights, SleepTier, Slept, WeightVersion
from rlhfless.util import processes
from rlhfless.weights.address import StoreAddress

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds for multiprocessing's resource tracker to remove leftover shared memory after the other processes exit."""

KILL_S = 10.0
"""Seconds to wait for killed processes. The kernel reclaims a GPU's memory within seconds."""

_MODULE = "rlhfless.functions.generation.vllm.loop"


class VllmEngine:
    """The built-in `Engine`; see rlhfless.functions.generation.engine."""

    loads_in_flight: ClassVar[bool] = True

    def __init__(self, settings: EngineSettings, process: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self.settings = settings
        self.log = log
        self.loaded: WeightVersion | None = None
        """The version being served; None while it is still the model folder's."""
        self.start_seconds: dict[str, float] = {}
        """Duration of each start phase."""
        self.kv_capacity_tokens = 0
        """Capacity of the KV cache in tokens; 0 if the engine did not report it."""
        self.block_tokens = 0
        """Tokens per KV cache block, once the engine has started."""
        self.backends: Mapping[str, str] = {}
        """The implementations that vLLM chose: model runner, attention, sampler."""
        self.rest = Rest()
        self.shares: Mapping[str, float] = {}
        """See SharedEngine."""
        self._process = process
        self._folder = folder
        self._numbers = itertools.count()
        self._serials: dict[str, str] = {}  # of the requests in flight, by the caller's ID
        self._samples: dict[str, asyncio.Future[Sampled]] = {}  # by serial number
        self._progress: dict[str, int] = {}  # by serial number
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._started: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._failure: EngineError | None = None
        self._heard_s = time.monotonic()
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]

    @classmethod
    async def start(cls, settings: EngineSettings, log_file: Path | None = None) -> VllmEngine:
        """Start a process with the engine and wait until it can serve.

        Output is appended to `log_file`; without one, it is kept while the engine lives.

        Raises:
            RuntimeError: vLLM is missing or of another release.
            EngineTimeout: the start took longer than `timeouts.start_s`; the message ends with the log's last lines.
            EngineDead: the process exited during the start; the message has its traceback and the log's last lines.
        """
        require_supported_vllm()
        folder = Path(tempfile.mkdtemp(prefix="rlhfless-engine-"))  # of sockets, some of which vLLM leaves behind
        printed = log_file or folder / "engine.log"
        ours, theirs = socket.socketpair()
        with theirs, printed.open("ab") as output:
            process = subprocess.Popen(  # noqa: ASYNC220 - quick, and asyncio's own needs a child watcher
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that all its processes can be found
                env=engine_environment(settings, os.environ) | {"VLLM_RPC_BASE_PATH": str(folder)},
            )
        engine = cls(settings, process, folder, printed)
        reader, engine._writer = await asyncio.open_connection(sock=ours)
        engine._reading = asyncio.create_task(engine._read(reader))
        engine._send(settings)
        try:
            engine.start_seconds = await engine._wait(engine._started, settings.timeouts.start_s, "start")
        except BaseException:
            engine.kill()  # it reads no messages while it starts
            await engine.stop()
            raise
        return engine

    @property
    def pids(self) -> tuple[int, ...]:
        return processes.session_members(self._process.pid)

    @property
    def usable(self) -> bool:
        return self._failure is None

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate one response; see Engine.sample."""
        self.rest.require_awake("generate a sample")
        if request.request_id in self._serials:
            raise ValueError(f"request {request.request_id!r} is in flight already; ids must differ")
        future = self._expect()
        # The caller may reuse an ID before the engine's answer to its first use arrives; serial numbers are never
        # reused.
        serial = str(next(self._numbers))
        if not self._samples:  # idle until now, so silence counts from here
            self._heard_s = time.monotonic()
        self._serials[request.request_id] = serial
        self._samples[serial] = future
        self._send(Submit(replace(request, request_id=serial)))
        try:
            sampled: Sampled = await self._wait(
                future, self.settings.timeouts.generate_s, f"sample {request.request_id}"
            )
            return replace(sampled, request_id=request.request_id)
        finally:
            del self._serials[request.request_id], self._samples[serial]
            if future.cancelled() and self.usable:
                self._send(EngineCall(next(self._numbers), "abort", ((serial,),)))

    def require_heartbeat(self, limit_s: float) -> None:
        """Raise EngineDead if the process has work but has sent nothing for `limit_s`, that is, hangs.

        Silence does not count during a call such as a weight load, which occupies the process and has its own limit.
        """
        silent_s = time.monotonic() - self._heard_s
        if self._samples and not self._calls and silent_s > limit_s:
            self._fail(EngineDead(f"the engine has been silent for {silent_s:.0f} s, with work to do"))
            raise EngineDead(str(self._failure))

    def kill(self) -> None:
        self._fail(EngineDead("the engine was killed"))
        self._process.kill()  # the kernel kills the others (`processes.die_with_spawner`); see also `_reap`

    def progress(self) -> dict[str, int]:
        """Return the generated tokens of each unfinished request; up to a fraction of a second old."""
        return {name: self._progress.get(serial, 0) for name, serial in self._serials.items()}

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        chosen = None
        if request_ids is not None:
            chosen = tuple(self._serials[name] for name in request_ids if name in self._serials)
        await self._call("abort", chosen, timeout_s=self.settings.timeouts.drain_s)

    async def load(
        self, published: PublishedWeights, *, in_flight: bool = False, store: StoreAddress | None = None
    ) -> LoadReport | None:
        """Load a version and drop the prefix cache; see Engine.load, and SharedEngine.load for one with a `store`."""
        self.rest.require_weights("load weights")
        if store is not None:
            limit_s = self.settings.timeouts.sync_s
            shared: LoadReport = await self._call("load", published, in_flight, asdict(store), timeout_s=limit_s)
            return shared
        if self.usable and self.loaded == published.version:
            return None
        report: LoadReport = await self._change(f"loading {published.version.label}", "load", published, in_flight)
        self.loaded = published.version
        self.rest.empty = False
        return report

    async def sleep(self, tier: SleepTier) -> Slept:
        if self.rest.tier is not None:
            return Slept(self.rest.tier, 0, 0)
        slept: Slept = await self._change("falling asleep", "sleep", tier)
        self.rest.slept(tier)
        if self.rest.empty:
            self.loaded = None
        return slept

    async def wake(self, *parts: EnginePart) -> None:
        asleep = tuple(part for part in parts or ENGINE_PARTS if part in self.rest.parts)
        if not asleep:
            return
        await self._change("waking up", "wake", asleep)
        self.rest.woke(asleep)

    async def logprobs(self, token_ids: tuple[int, ...], run_id: str = "") -> tuple[float, ...]:
        """Return the logprobs of a text; see Engine.logprobs. Unfinished requests continue meanwhile."""
        self.rest.require_awake("compute logprobs")
        limit_s = self.settings.timeouts.sync_s
        result: tuple[float, ...] = await self._call("logprobs", token_ids, run_id, timeout_s=limit_s)
        return result

    async def leave(self, run_id: str) -> None:
        """Drop a run's adapters; see SharedEngine.leave."""
        await self._call("leave", run_id, timeout_s=self.settings.timeouts.sync_s)

    async def stop(self) -> None:
        """Stop the process: ask, wait `timeouts.drain_s`, kill. Unfinished requests raise `EngineDead`."""
        self._fail(EngineDead("the engine was stopped"))
        self._send(Stop())
        await asyncio.to_thread(self._reap)
        self._writer.close()
        self._reading.cancel()

    def _reap(self) -> None:
        """Wait for the process to exit, end the engine's other processes, and remove their files."""
        self._wait_for_end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_end(self) -> int:
        """Wait for the process to exit, end the engine's other processes, and return the exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.settings.timeouts.drain_s)
        if not processes.end_session(self._process.pid, GRACE_S, KILL_S):
            log.error("engine processes still running %.0f s after SIGKILL; they may hold a device", KILL_S)
        return self._process.wait()

    async def _change(self, doing: str, method: str, *arguments: Any) -> Any:
        """Make a call that changes the engine's state.

        Any failure except EngineBusy, which precedes the change, leaves the state unknown and the engine unusable.
        """
        try:
            return await self._call(method, *arguments, timeout_s=self.settings.timeouts.sync_s)
        except EngineBusy:
            raise
        except Exception as error:
            self._fail(EngineDead(f"{doing} failed: {error}"))
            raise

    async def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        call_id = next(self._numbers)
        future = self._expect()
        self._calls[call_id] = future
        self._send(EngineCall(call_id, method, arguments))
        try:
            return await self._wait(future, timeout_s, method)
        finally:
            del self._calls[call_id]

    def _expect(self) -> asyncio.Future[Any]:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        return asyncio.get_running_loop().create_future()

    def _send(self, message: object) -> None:
        # If the process has died, `_read` notices; a socket error adds nothing.
        if not self._writer.is_closing():
            self._writer.write(processes.encode(message))

    async def _wait(self, future: asyncio.Future[Any], timeout_s: float, what: str) -> Any:
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            failure = EngineTimeout(self._told(f"the engine did not finish `{what}` within {timeout_s:g} s"))
            self._fail(failure)
            raise failure from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._receive(await processes.read(reader))
        except (EOFError, OSError):
            code = await asyncio.to_thread(self._wait_for_end)
            what = "process of vLLM's core" if code == CORE_DIED else "process"
            self._fail(EngineDead(self._told(f"the engine's {what} ended; exit code {code}")))
            shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self, message: Answer) -> None:
        self._heard_s = time.monotonic()
        match message:
            case Finished():
                self.shares = message.shares or self.shares
                for sampled in message.ended:
                    _resolve(self._samples.get(sampled.request_id), sampled)
            case Refused():
                _resolve(self._samples.get(message.request_id), message.error)
            case EngineProgress():
                self._progress, self.shares = message.tokens, message.shares or self.shares
            case Returned():
                _resolve(self._calls.get(message.call_id), message.error or message.value)
            case Started():
                self.kv_capacity_tokens = message.kv_capacity_tokens
                self.block_tokens = message.block_tokens
                self.backends = message.backends
                _resolve(self._started, message.seconds)
            case Crashed():
                self._fail(EngineDead(self._told(f"the engine's process failed:\n{message.trace.rstrip()}")))

    def _told(self, what: str) -> str:
        """Extend a fault with the log: its last lines if the start failed, and later its path.

        The last lines may contain the cause if vLLM's core is a separate process.
        """
        if self.start_seconds:
            return what if self.log.parent == self._folder else f"{what}; its log is {self.log}"
        return f"{what}\n{errors_and_end(self.log, what)}".rstrip()

    def _fail(self, failure: EngineError) -> None:
        """Record the first failure, which is the cause, and end every wait with its own exception."""
        self._failure = self._failure or failure
        waiting: list[asyncio.Future[Any]] = [self._started, *self._samples.values(), *self._calls.values()]
        for future in waiting:
            _resolve(future, EngineDead(str(self._failure)))


def _resolve(future: asyncio.Future[Any] | None, outcome: object) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
