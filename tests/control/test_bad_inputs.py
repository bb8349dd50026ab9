"""What is typed wrong: each is refused with the field, the value and the hint; none is a fault of the service."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest

from fakes.fake_service import RUN, NoDrivers, Pushes, until
from rlhfless.spec import SizesSpec

JSON = {"Content-Type": "application/json"}
TOO_LARGE = 2**63


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 422, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("content", "headers", "message"),
    [
        (b"", JSON, "the body: is missing"),
        (b"{", JSON, "the body: is no JSON: "),
        (b"[]", JSON, "the body: []: should be a valid dictionary"),
        (b'"x"', JSON, "the body: 'x': should be a valid dictionary"),
        (json.dumps(RUN).encode(), {"Content-Type": "text/plain"}, "send it with `Content-Type: application/json`"),
        (b'{"name": "\xff"}', JSON, "not UTF-8, or nested too deeply"),
        (b"[" * 100_000, JSON, "not UTF-8, or nested too deeply"),
        (json.dumps(RUN).encode(), JSON | {"Idempotency-Key": ""}, "idempotency-key: '': String should have"),
    ],
)
def test_a_body_that_is_none(
    shared_client: httpx.Client, content: bytes, headers: dict[str, str], message: str
) -> None:
    assert message in refused(shared_client.post("/v1/runs", content=content, headers=headers))["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": {"path": "/a\0b"}}, "model.path"),
        ({"metadata": {"a": "x\0y"}}, "metadata.a"),
        ({"metadata": {"x\0y": "a"}}, "metadata"),
        ({"steps": TOO_LARGE}, "steps"),
        ({"seed": -TOO_LARGE - 1}, "seed"),
    ],
)
def test_what_no_database_keeps_is_named(shared_client: httpx.Client, changes: dict[str, Any], param: str) -> None:
    assert refused(shared_client.post("/v1/runs", json=RUN | changes))["param"] == param


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "169.254.169.254"])
def test_an_address_that_no_reward_may_reach_is_refused_at_once(
    client: httpx.Client, drivers: NoDrivers, listener: Any, host: str
) -> None:
    rewards = [{"type": "http", "url": f"http://{host}:{listener.server_address[1]}/score"}]
    samples = [{"prompt": "p", "response": "r"}]
    for path, body in (
        ("runs", RUN | {"rewards": rewards}),
        ("runs:plan", {"spec": RUN | {"rewards": rewards}}),
        ("rewards:test", {"rewards": rewards, "samples": samples}),
    ):
        error = refused(client.post(f"/v1/{path}", json=body))
        assert error["param"] == "rewards.0.url"
        assert "a run may not reach it" in error["message"]
    assert (drivers.orders, listener.connections) == ([], 0)


def test_a_post_does_not_wait_for_a_slow_resolver(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, resolve = threading.Event(), socket.getaddrinfo

    def slow(host: Any, *given: Any, **named: Any) -> Any:
        return resolve(host, *given, **named) if host != "slow.example" else answers.wait(60) and []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        reward = {"type": "http", "url": "http://slow.example/score"}
        assert client.post("/v1/runs", json=RUN | {"rewards": [reward]}).status_code == 201
        assert not answers.is_set()
    finally:
        answers.set()


def test_half_a_surrogate_pair_is_named(client: httpx.Client) -> None:
    body = json.dumps(RUN | {"metadata": {"a": "\ud800"}})
    assert refused(client.post("/v1/runs", content=body, headers=JSON))["param"] == "metadata.a"


@pytest.mark.parametrize(
    "path",
    [
        f"events?after={TOO_LARGE}",
        f"rollouts?step={TOO_LARGE}",
        f"metrics?after_step={TOO_LARGE}",
        "events?after=-1",
        "events?limit=many",
        "logs?lines=0",
    ],
)
def test_numbers_out_of_range_are_refused_with_their_value(client: httpx.Client, path: str) -> None:
    run = client.post("/v1/runs", json=RUN).json()["id"]
    name, _, value = path.partition("?")[2].partition("=")
    error = refused(client.get(f"/v1/runs/{run}/{path}"))
    assert error["param"] == name
    assert value in error["message"]
    assert refused(client.get(f"/v1/runs/{run}/events", headers={"Last-Event-ID": str(TOO_LARGE)}))["param"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "runs?stauts=running",
            "stauts: unknown query parameter; did you mean `status`? Parameters here: after, limit",
        ),
        ("runs?metadata=a", "metadata: unknown query parameter"),
        ("runs/none?x=1", "x: unknown query parameter; There are none here"),
    ],
)
def test_an_unknown_query_parameter_is_refused(shared_client: httpx.Client, path: str, message: str) -> None:
    assert message in refused(shared_client.get(f"/v1/{path}"))["message"]


def test_what_is_not_there_is_named_with_where_to_look(client: httpx.Client) -> None:
    for path in ("runs/none", "runs/none/events", "nothing"):
        answer = client.get(f"/v1/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert answer.json()["error"]["message"] == "there is nothing at /v1/nothing; /openapi.json lists what there is"
    answer = client.put("/v1/runs")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"].startswith("/v1/runs takes no PUT")


@pytest.mark.parametrize("path", ["/v1/runs/%00", "/v1/runs?after=%00", "/v1/runs?metadata[%00]=b"])
def test_a_nul_in_a_url_is_refused(shared_client: httpx.Client, path: str) -> None:
    assert "NUL" in refused(shared_client.get(path))["message"]


def test_runs_are_found_by_labels_of_any_characters(client: httpx.Client) -> None:
    labels = {'a"b': "1", "a.b": "2", "ü": "ß", "a'b": "%", "$": ""}
    run = client.post("/v1/runs", json=RUN | {"metadata": labels}).json()["id"]
    client.post("/v1/runs", json=RUN)
    for name, value in labels.items():
        found = client.get("/v1/runs", params={f"metadata[{name}]": value})
        assert found.status_code == 200, (name, found.text)
        assert [one["id"] for one in found.json()["data"]] == [run], name
        assert client.get("/v1/runs", params={f"metadata[{name}]": "other"}).json()["data"] == []


def test_limits_are_put_over_those_of_a_paused_run_and_never_into_the_air(
    client: httpx.Client, drivers: NoDrivers
) -> None:
    limits = {"max_cost_usd": 1.0, "max_wall_clock_s": 60.0, "then": "stop"}
    run = client.post("/v1/runs", json=RUN | {"limits": limits}).json()["id"]
    resume = f"/v1/runs/{run}/resume"
    until(lambda: drivers.orders)
    push = Pushes(client, drivers.orders[0])
    push(("resolved", {"spec": RUN | {"limits": limits}}), ("status", {"status": "running", "reason": ""}))
    early = client.post(resume, json={"limits": {"max_cost_usd": 5.0}})
    assert (early.status_code, early.json()["error"]["param"]) == (409, "limits")
    assert client.post(resume, json={"limits": {"max_cost_usd": 1.0}}).status_code == 200, "it has them already"
    client.post(f"/v1/runs/{run}/pause")
    push(("ended", {"status": "paused", "reason": "paused", "error": None, "retry": False}))
    for wrong in ({"limits": 3}, {"limits": {"max_cost": 3}}, {"limits": {"max_cost_usd": -1}}, {"steps": 3}):
        assert refused(client.post(resume, json=wrong))["message"]
    assert client.get(f"/v1/runs/{run}").json()["status"] == "paused"
    raised = client.post(resume, json={"limits": {"max_cost_usd": 5.0, "max_wall_clock_s": None}}).json()
    wanted = {"max_cost_usd": 5.0, "max_device_hours": None, "max_wall_clock_s": None, "then": "stop"}
    assert raised["spec"]["limits"] == wanted
    until(lambda: len(drivers.orders) == 2)
    assert drivers.orders[1].spec["limits"] == {"max_cost_usd": 5.0, "max_wall_clock_s": None, "then": "stop"}


def test_a_run_that_has_reached_a_limit_is_resumed_with_a_higher_one(client: httpx.Client, drivers: NoDrivers) -> None:
    run = client.post("/v1/runs", json=RUN | {"limits": {"max_cost_usd": 1.0}}).json()["id"]
    resume = f"/v1/runs/{run}/resume"
    until(lambda: drivers.orders)
    push = Pushes(client, drivers.orders[0])
    names = ("busy_device_s", "idle_device_s", "cold_device_s", "cold_starts", "invocations")
    used = dict.fromkeys(names, 0) | {"function": "learner", "kind": "h100", "cost_usd": 1.5}
    failure = {"code": "limit_reached", "message": "limits.max_wall_clock_s is 9", "param": "limits", "problems": []}
    paused = {"status": "paused", "reason": "paused", "error": failure, "retry": False}
    push(("usage", {"functions": [used]}), ("ended", paused))
    for body in (None, {"limits": {"max_cost_usd": 1.25}}):
        answer = client.post(resume, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "limit_reached")
        assert "the run has used 1.5" in answer.json()["error"]["message"]
    assert client.get(f"/v1/runs/{run}").json()["status"] == "paused"
    assert client.post(resume, json={"limits": {"max_cost_usd": 2.0}}).status_code == 200


@pytest.mark.parametrize("samples", [2**31, 2**31 - 1, 10**18])
def test_a_step_of_too_many_samples_is_refused(shared_client: httpx.Client, samples: int) -> None:
    error = refused(shared_client.post("/v1/runs", json=RUN | {"samples_per_prompt": samples}))
    assert error["param"] == "samples_per_prompt"
    assert (
        f"samples_per_prompt ({samples:,}) is {64 * samples:,}, above sizes.step_samples (65,536)" in error["message"]
    )


@pytest.mark.parametrize("settings", [SizesSpec(step_samples=100)], indirect=True)
def test_the_operator_lowers_what_a_spec_may_ask_for(client: httpx.Client, drivers: NoDrivers) -> None:
    error = refused(client.post("/v1/runs", json=RUN | {"sizes": {"step_samples": 1000}}))
    assert error["message"].endswith("is 512, and this service allows at most 100; ask for less")
    small = RUN | {"prompts_per_step": 10}
    assert client.post("/v1/runs", json=small).status_code == 201
    until(lambda: len(drivers.orders) == 1)
    assert drivers.orders[0].sizes["step_samples"] == 100


def test_a_document_that_is_nested_too_deeply_is_refused(client: httpx.Client) -> None:
    nested: Any = {}
    for _ in range(200):
        nested = {"a": [nested]}
    reward = {"type": "python", "target": "a:b", "kwargs": nested}
    error = refused(client.post("/v1/runs", json=RUN | {"rewards": [reward]}))
    assert "nested more than 64 deep; write it flat" in error["message"]
