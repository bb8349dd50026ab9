"""The whole OpenAPI document, tried by schemathesis: no 5xx, and every answer as the document says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from fakes.fake_service import RUN, NoDrivers, served, there_is_ray
from rlhfless.control.settings import ServiceSettings

EXCLUDED = {
    "missing_required_header": "the headers that are needed authenticate, which loopback does not ask for",
    "ignored_auth": "the document names no authentication: whether keys are asked for is up to the operator",
    "unsupported_method": "Starlette answers TRACE and the like with 405 and no Allow header on some paths",
    "positive_data_acceptance": "a spec that has the shape of the document may still name what is not there",
    "use_after_free": "DELETE answers 409 for a run that has not ended, which the check takes for a deletion",
    "ensure_resource_availability": "a run that was POSTed may be looked for under the id of a simulation",
}
"""Checks that are not made, each with its reason."""

WITHOUT = ("/v1/events", "/v1/simulations", "/v1/runs:plan", "/v1/runs:compare", "/v1/rewards:test")
"""A stream without an end; and what computes for seconds: its own tests have it."""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import schemathesis  # seconds, in each process that reads this file

    folder: Path = tmp_path_factory.mktemp("service")
    there_is_ray(folder)
    with served(ServiceSettings(data=str(folder)), NoDrivers()) as (client, _):
        client.post("/v1/runs", json=RUN)
        schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
        yield schema.exclude(path=list(WITHOUT))


def test_every_answer_is_as_the_document_says(document: Any) -> None:
    from schemathesis.checks import CHECKS

    checks = [check for check in CHECKS.get_all() if check.__name__ not in EXCLUDED]
    tried = 0
    for found in document.get_all_operations():
        operation = found.ok()

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def holds(case: Any) -> None:
            # A stream of events would not end; tests/control/test_events_api.py reads them.
            case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "accept"}
            case.call_and_validate(checks=checks, timeout=20)

        holds()
        tried += 1
    assert tried > 15


def test_the_document_is_complete(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation.get("summary"), f"{method} {path} has no summary"
            if path.startswith("/v1"):
                assert {"401", "422"} <= set(operation["responses"]), f"{method} {path} says too little of errors"
    assert not [path for path in paths if path.startswith("/internal")]


def test_metrics_for_prometheus(client: httpx.Client) -> None:
    client.post("/v1/runs", json=RUN)
    text = client.get("/metrics").text
    assert 'rlhfless_devices{kind="cpu-core"} 2.0' in text
    assert 'rlhfless_runs{status="failed"} 0.0' in text
    assert "rlhfless_step{" in text
