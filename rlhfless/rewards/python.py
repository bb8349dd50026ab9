"""A user's own callable as a reward, in a worker process.

It gets the keyword arguments of its signature (docs/rewards.md), per sample or once with lists. Async functions are
called for all samples concurrently. A batch that fails as a whole is called again in smaller pieces, to find the
samples at fault. A sync call that exceeds its limit costs its worker.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from rlhfless.records import Prompt
from rlhfless.records.fields import dotted_names, find_field
from rlhfless.rewards.protocol import (
    ARGUMENTS,
    Begin,
    Done,
    Failed,
    Outcome,
    RewardError,
    RewardSample,
    RowFaults,
    Unscorable,
    attempt,
    column_problems,
    finite,
    pieces,
    quote,
)
from rlhfless.spec import PythonRewardSpec
from rlhfless.spec.explain import nearest
from rlhfless.spec.imports import TargetError, cause, load_target

T = TypeVar("T")

# Enough to keep a remote judge busy, few enough not to exhaust sockets.
_MAX_ASYNC_CALLS = 64

# The loop itself ends an async call that is too slow; a call that blocks the loop is left to the parent, after this.
_GRACE_S = 5.0


class PythonReward:
    """`package.module:function` as a reward. Raises RewardError if it cannot be imported or called."""

    def __init__(self, spec: PythonRewardSpec) -> None:
        self._spec = spec
        self._function = load(spec.label, spec.target)
        self._signature = signature(spec.label, spec.target, self._function)
        self._is_async = _is_async(self._function)
        self._runner: asyncio.Runner | None = None
        self._check_kwargs()

    @property
    def whole(self) -> bool:
        return self._spec.batch or self._is_async

    def prepare(self) -> None: ...

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        everything = tuple(range(len(samples)))
        if self._spec.batch:
            yield from self._run_batch(samples, everything)
        elif self._is_async:
            waves = math.ceil(len(samples) / _MAX_ASYNC_CALLS)
            yield Begin(everything, waves * self._spec.timeout_s + _GRACE_S)
            for index, outcome in enumerate(self._await(self._score_together(samples))):
                yield Done(index, outcome)
        else:
            for index, sample in enumerate(samples):
                yield Begin((index,), self._spec.timeout_s)
                yield Done(index, attempt(lambda one: self._number_of(self._call(self._arguments_of(one))), sample))

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Report required parameters that no sample, column or `kwargs` fills."""
        by_columns: dict[frozenset[str], list[Prompt]] = {}
        for prompt in prompts:
            by_columns.setdefault(frozenset(prompt.columns), []).append(prompt)
        problems: list[str] = []
        for field in self._spec.fields.values():
            if field not in ARGUMENTS:
                problems += column_problems(field, prompts, lambda _: True)
        for columns, affected in by_columns.items():
            available = [*ARGUMENTS, *sorted(columns), *self._spec.kwargs, *self._spec.fields]
            nested = dotted_names(affected[0].columns)
            for name in sorted(self._signature.required.difference(available)):
                first = affected[0].where or quote(affected[0].text)
                lacking = f"{self._spec.target!r} requires `{name}`, and nothing of that name is given"
                text = (
                    f"{lacking} in {len(affected)} of {len(prompts)} prompts (first: {first}). "
                    f"{nearest(name, available) or _nested_hint(name, nested)}Available: {', '.join(available)}"
                )
                problems.append(RowFaults(text, ((prompt, lacking) for prompt in affected)))
        return problems

    def _check_kwargs(self) -> None:
        for key, name in [("kwargs", name) for name in self._spec.kwargs] + [("fields", f) for f in self._spec.fields]:
            if name in ARGUMENTS:
                self._fail(f"`{key}` has `{name}`, which every sample fills itself; call it something else")
            if not self._signature.takes(name):
                self._fail(f"`{key}` has `{name}`, which {self._spec.target!r} does not take")
        if both := sorted(set(self._spec.kwargs) & set(self._spec.fields)):
            self._fail(f"`kwargs` and `fields` both have `{both[0]}`")

    async def _score_together(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        limit = asyncio.Semaphore(_MAX_ASYNC_CALLS)

        async def score(sample: RewardSample) -> Outcome:
            async with limit:
                try:
                    return self._number_of(await self._call_async(self._arguments_of(sample)))
                except Unscorable as error:
                    return Failed(str(error))

        return await asyncio.gather(*(score(sample) for sample in samples))

    def _run_batch(self, samples: Sequence[RewardSample], indices: tuple[int, ...]) -> Iterator[Begin | Done]:
        """Call once; if that fails as a whole, call once per piece, down to single samples."""
        yield Begin(indices, self._spec.timeout_s + (_GRACE_S if self._is_async else 0))
        try:
            outcomes = self._score_batch([samples[index] for index in indices])
        except Unscorable as error:
            if len(indices) == 1:
                yield Done(indices[0], Failed(str(error)))
                return
            for piece in pieces(samples, indices):
                yield from self._run_batch(samples, piece)
        else:
            for index, outcome in zip(indices, outcomes, strict=True):
                yield Done(index, outcome)

    def _score_batch(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        arguments = self._arguments(samples, list)
        result = self._await(self._call_async(arguments)) if self._is_async else self._call(arguments)
        items = _items(result)
        if items is None:
            raise Unscorable(f"returned {quote(repr(result))}; with `batch: true` it must return a list")
        if len(items) != len(samples):
            raise Unscorable(f"returned {len(items)} numbers for {len(samples)} samples: one per sample is needed")
        return [Failed(_no_number(item)) if (value := _number(item)) is None else value for item in items]

    def _number_of(self, result: Any) -> float:
        if (value := _number(result)) is None:
            hint = "; for a function that returns a list, set `batch: true`" if _items(result) is not None else ""
            raise Unscorable(f"{_no_number(result)}{hint}")
        return value

    def _arguments_of(self, sample: RewardSample) -> dict[str, Any]:
        return self._arguments([sample], lambda values: values[0])

    def _arguments(self, samples: Sequence[RewardSample], pack: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Build keyword arguments: sample fields take precedence over `kwargs`, and those over columns."""
        names = dict.fromkeys(name for sample in samples for name in sample.columns)
        arguments = {name: pack([sample.columns.get(name) for sample in samples]) for name in names}
        for name, field in self._spec.fields.items():
            own = field in ARGUMENTS
            values = [getattr(sample, field) if own else find_field(sample.columns, field) for sample in samples]
            arguments[name] = pack(values)
        arguments |= self._spec.kwargs
        for name in ARGUMENTS:
            arguments[name] = pack([getattr(sample, name) for sample in samples])
        return {name: value for name, value in arguments.items() if self._signature.takes(name)}

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        result = self._begin(arguments)
        return self._await(self._finish(result)) if inspect.isawaitable(result) else result

    async def _call_async(self, arguments: Mapping[str, Any]) -> Any:
        return await self._finish(self._begin(arguments))

    def _begin(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self._function(**arguments)
        except (Exception, SystemExit) as error:  # the user's function may raise any error
            raise self._raised(error) from error

    async def _finish(self, result: Any) -> Any:
        """Await the result for at most timeout_s."""
        limit_s = self._spec.timeout_s
        try:
            async with asyncio.timeout(limit_s) as clock:
                return await result
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and clock.expired():
                raise Unscorable(f"{self._spec.target!r} took longer than timeout_s ({limit_s:g} s)") from error
            raise self._raised(error) from error

    def _raised(self, error: BaseException) -> Unscorable:
        return Unscorable(f"{self._spec.target!r} raised {cause(error)}")

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the reward's single loop, so that sessions it keeps between calls stay usable."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(work)

    def _fail(self, what: str) -> NoReturn:
        raise RewardError(self._spec.label, what)


def _nested_hint(name: str, nested: Sequence[str]) -> str:
    """Suggest a nested field with the parameter's name."""
    inner = next((each for each in nested if each.rpartition(".")[2] == name), None)
    return f"Write `fields: {{{name}: {inner}}}` to fill it from there. " if inner else ""


def _no_number(result: Any) -> str:
    return f"returned {quote(repr(result))}, not a finite number"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
    )


def _number(value: Any) -> float | None:
    """Convert a number, NumPy scalar or one-element tensor to a finite float; else None."""
    if hasattr(value, "item") and not isinstance(value, Mapping):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return None  # more than one element
    return finite(value)


def _items(value: Any) -> list[Any] | None:
    """Return the items of a list, tuple, array or tensor; else None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """The keyword parameters of a callable."""

    required: frozenset[str]
    optional: frozenset[str]
    takes_all: bool
    """Whether it has `**kwargs`."""

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.required or name in self.optional


def load(reward: str, target: str) -> Callable[..., Any]:
    """Import the target. Raises RewardError naming the part that fails."""
    try:
        loaded = load_target(target)
    except TargetError as error:
        raise RewardError(reward, str(error)) from error
    if inspect.isclass(loaded) or not callable(loaded):
        kind = "a class" if inspect.isclass(loaded) else f"a {type(loaded).__name__}"
        raise RewardError(reward, f"{target!r} is {kind}, not a function; name a function or a callable object")
    return loaded  # type: ignore[no-any-return]


def signature(reward: str, target: str, function: Callable[..., Any]) -> Signature:
    """Return the keyword parameters. Raises RewardError if the function cannot be called by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(reward, f"{target!r} has no signature ({error}); wrap it in a function") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            what = f"{target!r} takes `{parameter.name}` by position only; rewards are called by keyword"
            raise RewardError(reward, f"{what}. Take the `/` out of its signature")
    named = [parameter for parameter in parameters if parameter.kind in _NAMED]
    required = frozenset(each.name for each in named if each.default is each.empty)
    return Signature(
        required=required,
        optional=frozenset(each.name for each in named) - required,
        takes_all=any(each.kind is each.VAR_KEYWORD for each in parameters),
    )
