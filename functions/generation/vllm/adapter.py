"""One vLLM engine behind an asynchronous surface that knows nothing of vLLM.

The engine is a process of its own (`loop`): a crash or a hang in native code cannot take the caller
along, and can be killed; the caller answers health checks while the engine computes. Only requests,
finished responses and a progress heartbeat cross the border, never single tokens. The processes that vLLM starts
beside it are of its session, and end with it: none may hold a device after that.

Invariants: every wait is bounded by `EngineSettings.timeouts`. After a failed load, a lost process or a
call that timed out, `usable` is False for ever, and every call raises `EngineDead`.
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
from dataclasses import replace
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
from rlhfless.functions.generation.vllm.arguments import engine_environment
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
from rlhfless.functions.generation.vllm.version import require_supported_vllm
from rlhfless.records import PublishedWeights, SleepTier, Slept, WeightVersion
from rlhfless.util import processes

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long multiprocessing's own process is left, which removes what others have left in shared memory once they are
gone."""

KILL_S = 10.0
"""How long killed processes are waited for. The kernel takes a GPU's memory back within seconds."""

_MODULE = "rlhfless.functions.generation.vllm.loop"


class VllmEngine:
    """See rlhfless.functions.generation.engine.Engine."""

    loads_in_flight: ClassVar[bool] = True
    """See Engine.load."""

    def __init__(self, settings: EngineSettings, process: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self.settings = settings
        self.log = log
        """What the engine's processes print."""
        self.loaded: WeightVersion | None = None
        """The version that serves; None while it is still the model folder's."""
        self.start_seconds: dict[str, float] = {}
        """Duration of each phase of the start."""
        self.kv_capacity_tokens = 0
        """Tokens that the KV cache holds; 0 if the engine did not say."""
        self.block_tokens = 0
        """Tokens of a block of the KV cache, once it has started."""
        self.backends: Mapping[str, str] = {}
        """The code that vLLM chose: model runner, attention, sampler."""
        self.rest = Rest()
        self._process = process
        self._folder = folder
        self._numbers = itertools.count()
        self._serials: dict[str, str] = {}  # of the requests in flight, by the caller's id
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
        """Starts a process with the engine in it and waits until it can serve. What it prints is appended to
        `log_file`; without one it is kept while the engine lives.

        Raises:
            RuntimeError: vLLM is missing or of another release.
            EngineTimeout: the start took longer than `timeouts.start_s`; the message ends with the log's last lines.
            EngineDead: the process ended during the start; the message holds its trace and the log's last lines.
        """
        require_supported_vllm()
        folder = Path(tempfile.mkdtemp(prefix="rlhfless-engine-"))  # of sockets, some of which vLLM leaves
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
        """The engine's processes."""
        return processes.session_members(self._process.pid)

    @property
    def usable(self) -> bool:
        """The engine can serve."""
        return self._failure is None

    async def sample(self, request: SampleRequest) -> Sampled:
        """Draws one response. If the caller is cancelled, so is the request.

        Raises:
            ValueError: a request of this id is in flight.
            EngineError: the engine refuses the request, for example because the prompt is too long.
            EngineTimeout: it took longer than `timeouts.generate_s`.
            EngineDead: the engine is lost.
        """
        self.rest.require_awake("draw a sample")
        if request.request_id in self._serials:
            raise ValueError(f"request {request.request_id!r} is in flight already; ids must differ")
        future = self._expect()
        # The caller may reuse an id before the engine's answer to its first use arrives; serial numbers are never
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
        """Raise EngineDead if the process has work and has sent nothing for `limit_s`: it hangs.

        A call such as a weight load occupies the process and has a limit of its own, so silence does not count
        meanwhile.
        """
        silent_s = time.monotonic() - self._heard_s
        if self._samples and not self._calls and silent_s > limit_s:
            self._fail(EngineDead(f"the engine has been silent for {silent_s:.0f} s, with work to do"))
            raise EngineDead(str(self._failure))

    def kill(self) -> None:
        """End an engine that cannot be talked to any more, with all its processes. Idempotent."""
        self._fail(EngineDead("the engine was killed"))
        self._process.kill()  # and the kernel the others (`processes.die_with_spawner`); see also `_reap`

    def progress(self) -> dict[str, int]:
        """Tokens drawn so far of each unfinished request; up to a fraction of a second old."""
        return {name: self._progress.get(serial, 0) for name, serial in self._serials.items()}

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Ends the given requests, or all. Their `sample` calls return what was drawn, with reason ABORT.

        Ids that are not in flight are ignored: they have just finished.
        """
        chosen = None
        if request_ids is not None:
            chosen = tuple(self._serials[name] for name in request_ids if name in self._serials)
        await self._call("abort", chosen, timeout_s=self.settings.timeouts.drain_s)

    async def load(self, published: PublishedWeights, *, in_flight: bool = False) -> LoadReport | None:
        """Loads a version and drops the prefix cache. Returns None if the version is loaded already. With `in_flight`
        unfinished requests go on with the new weights; see Engine.load.

        The digest and number of the tensors that the model consumed are checked
        (`weights.check.check_consumed`).

        Raises:
            EngineBusy: requests are unfinished, and the load is not in flight; abort them first. Nothing was changed.
            WeightCheckFailed, WeightFileError: the load failed, and the engine is unusable from now on.
            EngineTimeout: it took longer than `timeouts.sync_s`; unusable as well.
        """
        self.rest.require_weights("load weights")
        if self.usable and self.loaded == published.version:
            return None
        report: LoadReport = await self._change(f"loading {published.version.label}", "load", published, in_flight)
        self.loaded = published.version
        self.rest.empty = False
        return report

    async def sleep(self, tier: SleepTier) -> Slept:
        """See Engine.sleep."""
        if self.rest.tier is not None:
            return Slept(self.rest.tier, 0, 0)
        slept: Slept = await self._change("falling asleep", "sleep", tier)
        self.rest.slept(tier)
        if self.rest.empty:
            self.loaded = None
        return slept

    async def wake(self, *parts: EnginePart) -> None:
        """See Engine.wake."""
        asleep = tuple(part for part in parts or ENGINE_PARTS if part in self.rest.parts)
        if not asleep:
            return
        await self._change("waking up", "wake", asleep)
        self.rest.woke(asleep)

    async def logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprob of each of `token_ids` [tokens] except the first, given the tokens before it, at temperature 1:
        [tokens - 1]. Unfinished requests go on meanwhile."""
        self.rest.require_awake("compute logprobs")
        result: tuple[float, ...] = await self._call("logprobs", token_ids, timeout_s=self.settings.timeouts.sync_s)
        return result

    async def stop(self) -> None:
        """Ends the process: asks, waits `timeouts.drain_s`, kills. Unfinished requests raise `EngineDead`."""
        self._fail(EngineDead("the engine was stopped"))
        self._send(Stop())
        await asyncio.to_thread(self._reap)
        self._writer.close()
        self._reading.cancel()

    def _reap(self) -> None:
        """Waits for the process's end, ends the engine's other processes, and removes their files."""
        self._wait_for_end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_end(self) -> int:
        """Waits for the process's end, and ends the engine's other processes. Returns its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.settings.timeouts.drain_s)
        if not processes.end_session(self._process.pid, GRACE_S, KILL_S):
            log.error("processes of an engine are there %.0f s after they were killed; they may hold a device", KILL_S)
        return self._process.wait()

    async def _change(self, doing: str, method: str, *arguments: Any) -> Any:
        """A call that changes what the engine holds: after any failure but EngineBusy, which comes before the change,
        its state is unknown, and it is unusable."""
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
        # If the process has died, `_read` finds out; an error of the socket adds nothing.
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
                for sampled in message.ended:
                    _resolve(self._samples.get(sampled.request_id), sampled)
            case Refused():
                _resolve(self._samples.get(message.request_id), message.error)
            case EngineProgress():
                self._progress = message.tokens
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
        """A fault with what the log adds to it: of a failed start the last lines, which may have the cause, as where
        vLLM's core is a process of its own; later where the log is."""
        if self.start_seconds:
            return what if self.log.parent == self._folder else f"{what}; its log is {self.log}"
        return f"{what}\n{errors_and_end(self.log, what)}".rstrip()

    def _fail(self, failure: EngineError) -> None:
        """The first failure is the cause; it ends every wait, each with an exception of its own."""
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
