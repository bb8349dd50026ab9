"""An event loop on a virtual clock: when all tasks wait, the clock jumps to the next timer.

Live code runs on it unchanged: `asyncio.sleep`, timeouts and `rlhfless.util.clock` count virtual seconds. Nothing may
take real time: a thread's function is called at once, in the loop itself, and files and sockets are refused. If nothing
is ready and no timer is left, the loop raises NothingDue.
"""

from __future__ import annotations

import asyncio
import gc
import math
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from rlhfless.util.clock import VirtualClock

T = TypeVar("T")

COLLECT_AFTER = 50_000
"""New objects between two collections of garbage."""


class NothingDue(RuntimeError):
    """All tasks wait, and no timer is left: for each other, or for a thread, file or process outside the simulation."""


class VirtualLoop(asyncio.SelectorEventLoop, VirtualClock):
    """An event loop whose clock starts at 0."""

    def __init__(self) -> None:
        super().__init__(_Jumps(self))
        self.before_jump: Callable[[float], float] = lambda at_s: at_s
        """Called with the time of the next timer, or infinity; returns the time to jump to, which may be earlier."""
        self.each_turn: Callable[[], bool] | None = None
        """Called at each turn; returns whether something happened, so that the clock must not jump yet."""

    def time(self) -> float:
        return self.now_s

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Any,  # noqa: ARG002
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Call the function now: on a virtual clock, a thread takes no time."""
        called: asyncio.Future[T] = self.create_future()
        try:
            called.set_result(func(*args))
        except Exception as error:
            called.set_exception(error)
        return called


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock that starts at 0, and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, _few_collections():
        return runner.get_loop().run_until_complete(main)  # runner.run() takes time to describe a large result


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage seldom within the block: most objects of a run are kept to its end, and looking at them again and
    again takes a fifth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Jumps(selectors.BaseSelector):
    """The loop's wait for files, which waits for none and sets the clock instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._own: selectors.SelectorKey | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        each_turn = self._loop.each_turn
        if (each_turn is not None and each_turn()) or timeout == 0:
            return []
        now_s = self._loop.now_s
        at_s = self._loop.before_jump(math.inf if timeout is None else now_s + timeout)
        if math.isinf(at_s):
            raise NothingDue(f"nothing is due at {now_s:.3f} s, and {waiting(self._loop)}")
        self._loop.now_s = max(at_s, now_s)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._own is not None:
            raise NotImplementedError(f"a virtual clock does not wait for files and sockets, such as {fileobj!r}")
        self._own = selectors.SelectorKey(fileobj, fileobj, events, data)  # by which threads wake the loop
        return self._own

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key, self._own = self.get_key(fileobj), None
        return key

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {} if self._own is None else {self._own.fileobj: self._own}


def waiting(loop: VirtualLoop) -> str:
    """Describe the tasks that wait, and the line at which each does."""
    places = []
    for task in asyncio.all_tasks(loop):
        where = "".join(f" at {frame.f_code.co_filename}:{frame.f_lineno}" for frame in task.get_stack()[-1:])
        places.append(f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', task.get_coro())}{where})")
    return f"{len(places)} tasks wait: {'; '.join(sorted(places)[:8])}"
