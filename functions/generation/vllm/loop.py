"""The engine's process: reads messages between iterations of vLLM and writes answers.

    python -m rlhfless.functions.generation.vllm.loop <file descriptor of the channel> <pid of the adapter>

It lives as long as the channel, and exits when the adapter's process is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhfless.functions.devices import hide_flashinfer, require_cuda
from rlhfless.functions.generation.engine import EngineError, EngineSettings
from rlhfless.functions.generation.vllm.messages import (
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
from rlhfless.records import StartPhase
from rlhfless.util import processes
from rlhfless.weights.check import WeightCheckFailed, WeightFileError

if TYPE_CHECKING:
    from rlhfless.functions.generation.vllm.core import Core

PROGRESS_INTERVAL_S = 0.2  # fresher than any caller needs, and too rare to cost anything


def serve(channel: socket.socket, core: Core) -> None:
    """Run until a Stop message arrives or the channel closes."""
    next_progress = 0.0
    while True:
        while not core.busy or processes.is_waiting(channel):
            message = processes.receive(channel)
            if isinstance(message, Stop):
                return
            _handle(channel, core, message)
        if ended := core.step():
            processes.send(channel, Finished(tuple(ended), core.shares()))
        if time.monotonic() >= next_progress:
            processes.send(channel, EngineProgress(core.progress(), core.shares()))
            next_progress = time.monotonic() + PROGRESS_INTERVAL_S


def _handle(channel: socket.socket, core: Core, message: Submit | EngineCall) -> None:
    if isinstance(message, Submit):
        try:
            core.submit(message.request)
        except Exception as error:
            processes.send(channel, Refused(message.request.request_id, _portable(error)))
        return
    try:
        value = _CALLS[message.method](channel, core, *message.arguments)
        answer = Returned(message.call_id, value)
    except Exception as error:
        answer = Returned(message.call_id, error=_portable(error))
    processes.send(channel, answer)


def _portable(error: Exception) -> Exception:
    """Return our own errors unchanged and others as tracebacks: unpickling a vLLM error would import vLLM."""
    if isinstance(error, EngineError | WeightCheckFailed | WeightFileError):
        return error
    return EngineError("".join(traceback.format_exception(error)))


def _abort(channel: socket.socket, core: Core, request_ids: tuple[str, ...] | None) -> None:
    processes.send(channel, Finished(tuple(core.abort(request_ids)), core.shares()))


_CALLS: dict[str, Callable[..., Any]] = {
    "abort": _abort,
    "leave": lambda _channel, core, run_id: core.leave(run_id),
    "load": lambda _channel, core, *arguments: core.load(*arguments),
    "logprobs": lambda _channel, core, *arguments: core.logprobs(*arguments),
    "sleep": lambda _channel, core, tier: core.sleep(tier),
    "wake": lambda _channel, core, parts: core.wake(parts),
}


def main() -> None:
    """Start the engine, report that it has started, and serve."""
    processes.die_with(int(sys.argv[2]))
    # Ctrl-C reaches all processes of a terminal; this one exits with its adapter.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        settings: EngineSettings = processes.receive(channel)
        core, seconds = _start(settings)
        processes.send(channel, Started(seconds, core.kv_capacity_tokens, core.block_tokens, core.backends))
        serve(channel, core)
        core.close()
    except EOFError:
        pass
    except BaseException:
        processes.send(channel, Crashed(traceback.format_exc()))
        raise
    # The interpreter's shutdown would walk a million objects (2 s); nothing in this process is worth keeping.
    os._exit(0)


def _start(settings: EngineSettings) -> tuple[Core, dict[str, float]]:
    """Start the engine and return it with the seconds of each start phase.

    Imports create a million permanent objects. The garbage collector would walk them repeatedly (a third of the
    start), so it is disabled during the imports, and those objects are frozen.
    """
    started = time.monotonic()
    if settings.device == "cuda":
        require_cuda()
    hide_flashinfer()
    gc.disable()
    from rlhfless.functions.generation.vllm.core import Core  # most of the start

    gc.freeze()
    imported = time.monotonic()
    core = Core(settings)
    gc.enable()
    return core, {str(StartPhase.IMPORT): imported - started} | core.seconds


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # vLLM spawns its processes, which first import the spawning process's main module: this one.
    processes.die_with_spawner()
    hide_flashinfer()
