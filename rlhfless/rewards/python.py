"""A user's own callable as a reward.

It is called by keyword with what its signature asks for (docs/rewards.md): per sample, or once with lists.
Async functions are called for all samples at once. Sync ones run in a thread, one call at a time per reward,
so that they need not be thread-safe and the loop is never blocked. Each call has a time limit; a thread that
exceeds it cannot be stopped, but it is a daemon and keeps nothing from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from rlhfless.records import Prompt
from rlhfless.rewards.protocol import RewardError, Sample, quote
from rlhfless.rewards.target import ARGUMENTS, cause, load, signature
from rlhfless.spec import PythonRewardSpec
from rlhfless.spec.explain import nearest

T = TypeVar("T")

# Enough to keep a remote judge busy, few enough not to exhaust sockets.
_MAX_ASYNC_CALLS = 64


class PythonReward:
    """`package.module:function` as a reward. Raises RewardError if it cannot be imported or called."""

    def __init__(self, spec: PythonRewardSpec) -> None:
        self._spec = spec
        self._function = load(spec.label, spec.target)
        self._signature = signature(spec.label, spec.target, self._function)
        self._is_async = _is_async(self._function)
        self._limit = asyncio.Semaphore(_MAX_ASYNC_CALLS if self._is_async else 1)
        self._check_kwargs()

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        if not samples:
            return []
        if self._spec.batch:
            return await self._score_batch(samples)
        return await all_of([self._score_one(sample) for sample in samples])

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Required parameters that neither a sample, nor some prompt's columns, nor `kwargs` fill."""
        by_columns: dict[frozenset[str], list[Prompt]] = {}
        for prompt in prompts:
            by_columns.setdefault(frozenset(prompt.columns), []).append(prompt)
        found = []
        for columns, those in by_columns.items():
            available = [*ARGUMENTS, *sorted(columns), *self._spec.kwargs]
            for name in self._signature.unknown(available):
                found.append(
                    f"{self._spec.target!r} requires `{name}`, and nothing of that name is given in "
                    f"{len(those)} of {len(prompts)} prompts (first: {quote(those[0].text)}). "
                    f"{nearest(name, available)}Available: {', '.join(available)}"
                )
        return found

    def _check_kwargs(self) -> None:
        for name in self._spec.kwargs:
            if name in ARGUMENTS:
                self._fail(f"`kwargs` has `{name}`, which every sample fills itself; call it something else")
            if not self._signature.takes(name):
                self._fail(f"`kwargs` has `{name}`, which {self._spec.target!r} does not take")

    async def _score_one(self, sample: Sample) -> float:
        result = await self._call(self._arguments([sample], lambda values: values[0]), str(sample))
        if (value := _number(result)) is None:
            mend = "; for a function that returns a list, set `batch: true`" if _items(result) is not None else ""
            self._fail(f"returned {quote(repr(result))}, not a finite number, for {sample}{mend}")
        return value

    async def _score_batch(self, samples: Sequence[Sample]) -> list[float]:
        where = f"a batch of {len(samples)} samples, the first of prompt {samples[0].prompt_id!r}"
        result = await self._call(self._arguments(samples, list), where)
        items = _items(result)
        if items is None:
            self._fail(f"returned {quote(repr(result))} for {where}; with `batch: true` it must return a list")
        if len(items) != len(samples):
            self._fail(f"returned {len(items)} numbers for {where}: one per sample is needed")
        values = []
        for item, sample in zip(items, samples, strict=True):
            if (value := _number(item)) is None:
                self._fail(f"returned {quote(repr(item))}, not a finite number, for {sample}")
            values.append(value)
        return values

    def _arguments(self, samples: Sequence[Sample], pack: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Keyword arguments: what the sample has, before `kwargs`, before the columns."""
        names = dict.fromkeys(name for sample in samples for name in sample.columns)
        arguments = {name: pack([sample.columns.get(name) for sample in samples]) for name in names}
        arguments |= self._spec.kwargs
        for name in ARGUMENTS:
            arguments[name] = pack([getattr(sample, name) for sample in samples])
        return {name: value for name, value in arguments.items() if self._signature.takes(name)}

    async def _call(self, arguments: Mapping[str, Any], where: str) -> Any:
        limit_s = self._spec.timeout_s
        async with self._limit:
            try:
                async with asyncio.timeout(limit_s) as clock:
                    if not self._is_async:
                        result = await _in_thread(lambda: self._function(**arguments))
                    else:
                        result = self._function(**arguments)
                    return await result if inspect.isawaitable(result) else result
            except (Exception, SystemExit) as error:  # whatever the user's function raises
                if isinstance(error, TimeoutError) and clock.expired():
                    what = f"{self._spec.target!r} took longer than timeout_s ({limit_s:g} s) for {where}"
                    raise RewardError(self._spec.label, what) from error
                what = f"{self._spec.target!r} raised {cause(error)} for {where}"
                raise RewardError(self._spec.label, what) from error

    def _fail(self, what: str) -> NoReturn:
        raise RewardError(self._spec.label, what)


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all at once, in order. The first failure cancels the rest and is raised as itself."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def _in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function in a daemon thread of its own.

    Not `asyncio.to_thread`: its threads are joined when the process ends, so one stuck call would keep the
    process for ever.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Callable[[], T]] = loop.create_future()

    def settle(outcome: Callable[[], T]) -> None:
        if not done.done():  # cancelled by the time limit
            done.set_result(outcome)

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # carried over to the caller, who raises it
            outcome = _raiser(error)
        else:
            outcome = lambda: result  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop was closed after the time limit
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return (await done)()


def _raiser(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
    )


def _number(value: Any) -> float | None:
    """A finite float from a number, a NumPy scalar or a tensor of one element; None from anything else."""
    if hasattr(value, "item") and not isinstance(value, Mapping):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return None  # more than one element
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _items(value: Any) -> list[Any] | None:
    """The items of a list, tuple, array or tensor; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None
