"""Runs over HTTP: what a client sees and may ask for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from fakes.fake_service import RUN, NoDrivers, Pushes, begun_run, until
from rlhfless.control.run_files import allowed_in
from rlhfless.control.settings import ServiceSettings

STEP = {"step_s": 1.0, "reward_mean": 0.5}


def test_a_post_is_queued_and_shown(client: httpx.Client) -> None:
    answer = client.post("/v1/runs", json=RUN | {"metadata": {"team": "a"}, "priority": 3})
    assert answer.status_code == 201
    run = answer.json()
    assert (run["object"], run["name"], run["steps"], run["priority"]) == ("run", "small", 5, 3)
    assert run["metadata"] == {"team": "a"}
    assert client.get(f"/v1/runs/{run['id']}").json()["id"] == run["id"]


def test_every_wrong_field_is_named(client: httpx.Client) -> None:
    answer = client.post("/v1/runs", json=RUN | {"steps": 0, "stepz": 3, "output": "/tmp"})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "invalid_spec"
    assert {problem["param"] for problem in error["problems"]} == {"steps", "stepz"}
    own = client.post("/v1/runs", json=RUN | {"output": "/tmp", "placement": {"ray_address": "x:1"}})
    assert {problem["param"] for problem in own.json()["error"]["problems"]} == {"output", "placement.ray_address"}


def test_cross_field_errors_are_refused_at_once(client: httpx.Client) -> None:
    answer = client.post("/v1/runs", json=RUN | {"samples_per_prompt": 1})
    assert answer.status_code == 422
    assert "compares the samples of a prompt" in answer.json()["error"]["message"]


def test_the_same_key_and_body_are_one_run_also_at_the_same_time(client: httpx.Client) -> None:
    def post(_: int) -> httpx.Response:
        return client.post("/v1/runs", json=RUN, headers={"Idempotency-Key": "once"})

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(post, range(32)))
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(client.get("/v1/runs").json()["data"]) == 1
    other = client.post("/v1/runs", json=RUN | {"steps": 6}, headers={"Idempotency-Key": "once"})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_conflict"


def test_a_resume_may_allow_what_has_changed(
    client: httpx.Client, drivers: NoDrivers, settings: ServiceSettings
) -> None:
    run, push = begun_run(client, drivers)
    resume = f"/v1/runs/{run}/resume"
    folder = settings.runs / run
    folder.mkdir(parents=True, exist_ok=True)
    push(("ended", {"status": "paused", "reason": "prompts.path has changed", "error": None}))
    for wrong in ("data", ["dta"], [True], {"data": True}, ["schedule"]):
        answer = client.post(resume, json={"allow_changed": wrong})
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == "allow_changed"
    assert allowed_in(folder) == frozenset()
    assert client.post(resume, json={"allow_changed": ["data", "code", "data"]}).status_code == 200
    assert allowed_in(folder) == {"data", "code"}


def test_lists_go_page_by_page_newest_first_and_are_filtered(client: httpx.Client) -> None:
    made = [client.post("/v1/runs", json=RUN | {"metadata": {"n": str(n)}}).json()["id"] for n in range(5)]
    first = client.get("/v1/runs", params={"limit": 2}).json()
    assert ([run["id"] for run in first["data"]], first["has_more"]) == (made[:2:-1], True)
    rest = client.get("/v1/runs", params={"limit": 10, "after": first["data"][-1]["id"]}).json()
    assert ([run["id"] for run in rest["data"]], rest["has_more"]) == (made[2::-1], False)
    assert [run["id"] for run in client.get("/v1/runs", params={"metadata[n]": "3"}).json()["data"]] == [made[3]]
    client.post(f"/v1/runs/{made[0]}/cancel")
    cancelled = client.get("/v1/runs", params={"status": "cancelled"}).json()["data"]
    assert made[0] in {run["id"] for run in cancelled} | {
        run["id"] for run in client.get("/v1/runs").json()["data"] if run["status"] == "cancelling"
    }
    assert client.get("/v1/runs", params={"after": "no-such"}).status_code == 404
    assert client.get("/v1/runs", params={"limit": 0}).status_code == 422


def test_a_run_from_post_to_success(client: httpx.Client, drivers: NoDrivers) -> None:
    run, push = begun_run(client, drivers)
    answer = push(("status", {"status": "validating", "reason": "checking"}))
    assert answer.json() == {"pushed": 1, "desired_state": "run", "granted": 0, "lease_reason": "", "size_reason": ""}
    lease = {"kind": "cpu-core", "minimum": 2, "maximum": 2, "unit": 1, "held": 0}
    push(("status", {"status": "provisioning", "reason": "asking"}), lease=lease)
    assert until(lambda: push(lease=lease).json()["granted"]) == 2
    push(("status", {"status": "running", "reason": "running"}), lease=lease | {"held": 2})
    push(("metrics", {"step": 1, "kind": "step", "values": STEP}))
    now = client.get(f"/v1/runs/{run}").json()
    assert (now["status"], now["step"], now["latest"]["reward_mean"]) == ("running", 1, 0.5)
    assert now["started_at"] is not None
    ended = {"status": "succeeded", "reason": "all steps are done", "error": None, "retry": False}
    push(("ended", ended), lease=lease)
    assert client.get(f"/v1/runs/{run}").json()["status"] == "succeeded"
    assert client.post(f"/v1/runs/{run}/cancel").status_code == 409
    again = client.post("/v1/runs", json=RUN).json()["id"]
    until(lambda: len(drivers.orders) > 1)
    other = Pushes(client, drivers.orders[1])
    other.seq = 0
    assert until(lambda: other(lease=lease).json()["granted"]) == 2, "the first run's devices are free again"
    assert client.delete(f"/v1/runs/{again}").status_code == 409
    assert client.delete(f"/v1/runs/{run}").status_code == 204
    assert client.get(f"/v1/runs/{run}").status_code == 404
    assert client.get(f"/v1/runs/{run}/events").status_code == 404


def test_pause_resume_and_cancel_are_idempotent_and_reach_the_driver(client: httpx.Client, drivers: NoDrivers) -> None:
    run, push = begun_run(client, drivers)
    push(("status", {"status": "running", "reason": ""}))
    assert [client.post(f"/v1/runs/{run}/pause").json()["status"] for _ in range(2)] == ["pausing", "pausing"]
    assert push().json()["desired_state"] == "pause"
    assert client.post(f"/v1/runs/{run}/resume").json()["status"] == "running"
    assert push().json()["desired_state"] == "run"
    client.post(f"/v1/runs/{run}/pause")
    push(("ended", {"status": "paused", "reason": "paused: stopped after step 3", "error": None, "retry": False}))
    assert client.get(f"/v1/runs/{run}").json()["status"] == "paused"
    changed = client.post(f"/v1/runs/{run}/resume", json={"limits": {"max_cost_usd": 3.5}})
    assert changed.json()["status"] in ("queued", "validating")
    until(lambda: len(drivers.orders) == 2)
    assert drivers.orders[1].spec["limits"] == {"max_cost_usd": 3.5}
    assert drivers.orders[1].attempt == 2
    assert client.post(f"/v1/runs/{run}/resume", json={"steps": 3}).status_code == 422
    second = Pushes(client, drivers.orders[1])
    second.seq = push.seq
    assert [client.post(f"/v1/runs/{run}/cancel").json()["status"] for _ in range(2)] == ["cancelling"] * 2
    assert second(("status", {"status": "running", "reason": ""}), reason="step 1").json()["desired_state"] == "cancel"
    told = client.get(f"/v1/runs/{run}").json()
    assert (told["status"], told["status_reason"].partition(";")[0]) == ("cancelling", "cancelled")
    assert client.post(f"/v1/runs/{run}/pause").status_code == 409
    second(("ended", {"status": "cancelled", "reason": "cancelled", "error": None, "retry": False}))
    assert [client.post(f"/v1/runs/{run}/cancel").json()["status"] for _ in range(2)] == ["cancelled"] * 2
    assert client.post(f"/v1/runs/{run}/resume").status_code == 409


def test_items_count_once_and_leave_no_gap(client: httpx.Client, drivers: NoDrivers) -> None:
    run, push = begun_run(client, drivers)
    items = [
        {"seq": n, "attempt": 1, "at": 1.0, "kind": "message", "data": {"level": "info", "message": f"m{n}"}}
        for n in range(1, 6)
    ]
    assert push.again(items[:3]).json()["pushed"] == 3
    assert push.again(items[1:5]).json()["pushed"] == 5
    gap = push.again([items[0] | {"seq": 9}])
    assert (gap.status_code, gap.json()["error"]["code"]) == (409, "gap")
    events = client.get(f"/v1/runs/{run}/events").json()["data"]
    assert [event["message"] for event in events if event["type"] == "message"] == [f"m{n}" for n in range(1, 6)]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))


def test_a_driver_that_was_replaced_is_told(client: httpx.Client, drivers: NoDrivers) -> None:
    run, old = begun_run(client, drivers)
    old(("metrics", {"step": 1, "kind": "step", "values": STEP}))
    drivers.dead.add(0)
    until(lambda: len(drivers.orders) == 2)
    answer = old(("message", {"level": "info", "message": "from the dead"}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_attempt")
    assert client.get(f"/v1/runs/{run}").json()["attempt"] == 2
    stranger = Pushes(client, drivers.orders[1].model_copy(update={"token": "guessed"}))
    assert stranger().status_code == 401


def test_drivers_that_die_without_a_step_end_in_failure(client: httpx.Client, drivers: NoDrivers) -> None:
    run = client.post("/v1/runs", json=RUN).json()["id"]
    for count in range(1, 7):
        until(lambda count=count: len(drivers.orders) == count)
        drivers.dead.add(count - 1)
    until(lambda: client.get(f"/v1/runs/{run}").json()["status"] == "failed")
    found = client.get(f"/v1/runs/{run}").json()
    assert found["error"]["code"] == "driver_died"
    assert "SIGKILL" in found["status_reason"]
    assert len(drivers.orders) == 6


def test_only_so_many_drivers_at_a_time_and_by_priority(client: httpx.Client, drivers: NoDrivers) -> None:
    for _ in range(4):
        client.post("/v1/runs", json=RUN)
    until(lambda: len(drivers.orders) == 4)
    late = client.post("/v1/runs", json=RUN).json()["id"]
    urgent = client.post("/v1/runs", json=RUN | {"priority": 5}).json()["id"]
    until(lambda: "1 run(s) ahead, 4 running" in client.get(f"/v1/runs/{late}").json()["status_reason"])
    push = Pushes(client, drivers.orders[0])
    push(("ended", {"status": "succeeded", "reason": "done", "error": None, "retry": False}))
    until(lambda: len(drivers.orders) == 5)
    assert drivers.orders[4].run_id == urgent


def test_health(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["devices"]) == (200, {"cpu-core": 2})


def test_a_resumed_run_shows_the_step_of_its_checkpoint_at_once(client: httpx.Client, drivers: NoDrivers) -> None:
    run, push = begun_run(client, drivers)
    push(*(("metrics", {"step": step, "kind": "step", "values": STEP}) for step in (1, 2, 3)))
    assert client.get(f"/v1/runs/{run}").json()["step"] == 3
    push(("resumed", {"step": 2}))
    assert client.get(f"/v1/runs/{run}").json()["step"] == 2
