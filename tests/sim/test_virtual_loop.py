"""On a virtual clock, sleeps and timeouts take no real time, keep their order, and a wait without end is an error."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.sim.virtual_loop import NothingDue, VirtualLoop, run_virtual
from rlhfless.util.clock import monotonic_s, unix_s


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_timers_end_in_the_order_of_their_times_and_at_them(waits_s: list[float]) -> None:
    ended: list[tuple[float, float]] = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append((seconds, monotonic_s()))

    async def main() -> None:
        await asyncio.gather(*map(wait, waits_s))

    run_virtual(main())
    assert [seconds for seconds, _ in ended] == sorted(waits_s)
    assert all(at_s == pytest.approx(seconds, abs=1e-8) for seconds, at_s in ended)


def test_a_day_takes_no_time_and_both_clocks_count_it() -> None:
    async def main() -> tuple[float, float]:
        await asyncio.sleep(3 * 86_400)
        return unix_s(), monotonic_s()

    began_s = time.monotonic()
    assert run_virtual(main()) == (3 * 86_400, 3 * 86_400)
    assert time.monotonic() - began_s < 60
    assert unix_s() > 1e9, "outside, the clock is the system's"


def test_a_timeout_ends_what_takes_longer() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(10)
        return unix_s()

    assert run_virtual(main()) == 5


def test_what_advances_before_a_jump_may_stop_it_earlier() -> None:
    asked: list[float] = []

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        seen: list[float] = []

        def before_jump(at_s: float) -> float:
            asked.append(at_s)
            if at_s == math.inf:
                loop.call_at(20, done.set)
                return 20.0
            if loop.time() < 3:
                loop.call_at(3, lambda: seen.append(loop.time()))
                return 3.0
            return at_s

        loop.before_jump = before_jump
        await asyncio.sleep(10)
        seen.append(loop.time())
        await done.wait()
        return [*seen, loop.time()]

    done = asyncio.Event()
    assert run_virtual(main()) == [3.0, 10.0, 20.0]
    assert asked == [10.0, 10.0, math.inf]


def test_a_wait_without_end_is_an_error_that_names_the_task_and_the_line() -> None:
    async def wait_forever() -> None:
        await asyncio.sleep(2)
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(wait_forever(), name="the third actor")

    with pytest.raises(NothingDue, match=r"at 2\.000 s.*the third actor .*wait_forever at .*test_virtual_loop\.py:\d+"):
        run_virtual(main())


def test_a_thread_is_not_waited_for_and_its_functions_run_at_once() -> None:
    async def called() -> tuple[int, float]:
        return await asyncio.to_thread(threading.get_ident), unix_s()

    assert run_virtual(called()) == (threading.get_ident(), 0.0)

    async def failed() -> None:
        await asyncio.to_thread(int, "no number")

    with pytest.raises(ValueError, match="no number"):
        run_virtual(failed())

    async def real() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.Timer(0.05, lambda: loop.call_soon_threadsafe(done.set))
        thread.start()
        try:
            await done.wait()
        finally:
            thread.join()

    with pytest.raises(NothingDue):
        run_virtual(real())


def test_files_are_refused() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            asyncio.get_running_loop().add_reader(ours, lambda: None)

    with pytest.raises(NotImplementedError, match="does not wait for files and sockets"):
        run_virtual(main())
