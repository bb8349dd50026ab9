"""Handles of replicas that are Ray Serve applications."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from rlhfless.fleet.handles import HandleLost
from rlhfless.functions.calls import Reply


class ServeHandle:
    """See rlhfless.fleet.handles.Handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def call(self, method: str, *arguments: object, **keywords: object) -> _ServeReply:
        """See Handle."""
        return _ServeReply(getattr(self._handle, method).remote(*arguments, **keywords))

    def stream(self, method: str, *arguments: object) -> _ServeEvents:
        """See Handle."""
        return _ServeEvents(getattr(self._handle.options(stream=True), method).remote(*arguments))


class _ServeReply:
    def __init__(self, response: Any) -> None:
        self._response = response

    def __await__(self) -> Generator[Any, None, Reply[Any]]:
        with _translated():
            reply: Reply[Any] = yield from self._response.__await__()
            return reply

    async def sent(self) -> None:
        """See PendingReply. Ray returns a reference to the result only after it has sent the call."""
        with _translated():
            await self._response._to_object_ref()


class _ServeEvents:
    def __init__(self, events: Any) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        with _translated():
            return await anext(self._events)


@contextmanager
def _translated() -> Iterator[None]:
    """Translate Ray's errors into HandleLost, or the error that the method raised."""
    try:
        yield
    except RayTaskError as error:
        cause: BaseException = error.cause
        # Ray's own text is the remote traceback, which stays as the cause.
        raise cause from error
    except (RayError, RayServeException) as error:
        raise HandleLost(str(error)) from error
