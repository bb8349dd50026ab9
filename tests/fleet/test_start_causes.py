"""The report of a replica that did not start: the innermost cause, in full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from rlhfless.fleet.cluster import Cause, Cluster, innermost
from rlhfless.fleet.protocols import FleetError

# Text of Ray 2.60: an error of a learner's rank, reported through its controller and Serve's controller.
SERVE = """The deployment failed to start 1 times in a row. This may be due to a problem with its constructor or \
initial health check failing. See controller logs for details. Error:
\x1b[36mray::ServeReplica:run-learner-0:run-learner-0.initialize_and_get_metadata()\x1b[39m (pid=1, ip=127.0.0.1)
  File "/lib/ray/serve/_private/replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/lib/rlhfless/functions/learner/controller.py", line 19, in __init__
    await self._all("start", address)
ray.exceptions.RayTaskError(InputError): \x1b[36mray::RankActor.start()\x1b[39m (pid=2, ip=127.0.0.1)
  File "/lib/rlhfless/functions/policy.py", line 12, in load_policy
    raise error
{first}

The above exception was the direct cause of the following exception:

\x1b[36mray::ServeReplica:run-learner-0:run-learner-0.initialize_and_get_metadata()\x1b[39m (pid=1, ip=127.0.0.1)
  File "/lib/ray/serve/_private/replica.py", line 1867, in initialize
    await self._user_callable_wrapper.initialize_callable()
{last}
"""

BROKEN = """rlhfless.spec.errors.InputError: the model: 1 problem
- model.path: the tensor `lm_head.weight` is missing in model.safetensors
    take a model whose files are whole"""


def test_an_error_with_many_lines_is_told_whole() -> None:
    cause = innermost(["Failed to update the deployments ['x'].", SERVE.format(first=BROKEN, last=BROKEN)])
    assert cause == Cause(*BROKEN.split(": ", 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: 3 heads\n\nuse 4 heads", "ValueError: 3 heads\n\nuse 4 heads"),
        (
            "rlhfless.functions.generation.engine.EngineDead: the engine's process failed:\n"
            "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: 3 GiB are missing",
            "OutOfMemoryError: 3 GiB are missing",
        ),
        ("rlhfless.fleet.nowhere.Gone: away", "Gone: away"),
    ],
)
def test_the_innermost_is_told(text: str, expected: str) -> None:
    cause = innermost(["Failed to update.", SERVE.format(first="OSError: first", last=text)])
    assert str(cause) == expected


def test_a_replica_that_died_says_so() -> None:
    assert (
        str(innermost(["Failed to update.", "failed to start 1 times. Error:\nActorDiedError()"])) == "ActorDiedError()"
    )
    assert str(innermost(["", ""])) == "no reason given"


async def test_a_failed_start_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ValueError: 3 heads"
    failed = SimpleNamespace(message=SERVE.format(first=text, last=text))
    overview = SimpleNamespace(status=ApplicationStatus.DEPLOY_FAILED, message="", deployments={"x": failed})
    status: Any = SimpleNamespace(applications={"x": overview})
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(serve, "status", lambda: status)
    with pytest.raises(FleetError, match="x did not start: ValueError: 3 heads"):
        await Cluster().wait_running("x", 1)
