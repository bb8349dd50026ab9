"""Errors of Ray and of functions reach the fleet under the types that it knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rlhfless.fleet.handles import HandleLost
from rlhfless.fleet.serve_handles import ServeHandle


class Refused(Exception):
    """An error of a function."""


def handle_that(raises: Exception) -> ServeHandle:
    """Return the handle of a replica whose answers, and streams after one event, fail."""

    class Response:
        def __await__(self) -> Any:
            raise raises
            yield

        async def _to_object_ref(self) -> None:
            raise raises

    async def events() -> AsyncIterator[str]:
        yield "event"
        raise raises

    streaming = SimpleNamespace(work=SimpleNamespace(remote=lambda *_: events()))
    deployed = SimpleNamespace(work=SimpleNamespace(remote=lambda *_, **__: Response()), options=lambda **_: streaming)
    return ServeHandle(deployed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(RayActorError(), HandleLost), (RayTaskError("work", "the remote traceback", Refused("no")), Refused)],
)
async def test_errors_are_translated(raised: Exception, seen: type[Exception]) -> None:
    handle = handle_that(raised)
    with pytest.raises(seen) as error:
        await handle.call("work", 1)
    assert error.value.__cause__ is raised
    with pytest.raises(seen):
        await handle.call("work", 1).sent()
    events = handle.stream("work", 1)
    assert await anext(events) == "event"
    with pytest.raises(seen):
        await anext(events)
