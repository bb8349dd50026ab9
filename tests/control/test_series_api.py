"""What a run has measured, used, saved and said, over HTTP; and what replicas and devices do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fakes import filled_database as filled
from fakes.fake_service import NoDrivers, served
from rlhfless.control.service import Service
from rlhfless.control.settings import ServiceSettings
from rlhfless.util.text import MOST_BYTES, tail

RUN = f"/v1/runs/{filled.RUN_ID}"
QUEUED = "/v1/runs/demo-20261123-102907-c3a855f0"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Service]]:
    settings = ServiceSettings(data=str(tmp_path_factory.mktemp("series")), port=0, max_drivers=2)
    filled.fill(settings, filled.fill_run, filled.fill_others)
    with served(settings, NoDrivers()) as (client, service):
        service.replicas[filled.RUN_ID] = filled.replicas(time.time())
        service.replicas["lr-sweep-20261121-083000-5eed5eed"] = filled.replicas(time.time())  # it has ended
        yield client, service


@pytest.fixture
def api(pair: tuple[httpx.Client, Service]) -> httpx.Client:
    return pair[0]


def test_metrics_by_name_after_a_step_and_thinned(api: httpx.Client) -> None:
    found = api.get(f"{RUN}/metrics", params={"name": ["reward", "cost_usd"], "points": 50}).json()
    assert [one["name"] for one in found["series"]] == ["reward/format", "reward/math", "cost_usd"]
    assert found["step"] == 231
    cost = found["series"][2]
    assert (cost["steps"][0], cost["steps"][-1], cost["unit"]) == (1, 231, "usd")
    assert len(cost["steps"]) <= 50
    later = api.get(f"{RUN}/metrics", params={"name": "step_s", "after_step": 229}).json()
    assert later["series"][0]["steps"] == [230, 231]
    assert api.get(f"{RUN}/metrics", params={"after_step": 231}).json()["series"] == []
    between = api.get(f"{RUN}/metrics", params={"name": "step_s", "after_step": 19, "until_step": 22}).json()
    assert (between["step"], between["series"][0]["steps"]) == (22, [20, 21, 22])


def test_a_run_without_a_step_has_empty_answers(api: httpx.Client) -> None:
    assert api.get(f"{QUEUED}/metrics").json()["series"] == []
    assert api.get(f"{QUEUED}/checkpoints").json()["data"] == []
    assert api.get(f"{QUEUED}/rollouts").json()["data"] == []
    usage = api.get(f"{QUEUED}/usage").json()
    assert (usage["functions"], usage["best_static"], usage["planned"], usage["measured"]) == ([], None, None, None)
    assert api.get(f"{QUEUED}/logs").text == ""


@pytest.mark.parametrize("part", ["metrics", "checkpoints", "rollouts", "usage", "logs"])
def test_a_run_that_is_not_there_is_404(api: httpx.Client, part: str) -> None:
    assert api.get(f"/v1/runs/none/{part}").status_code == 404


def test_checkpoints_newest_first_with_the_best(api: httpx.Client) -> None:
    found = api.get(f"{RUN}/checkpoints").json()["data"]
    assert [(one["id"], one["best"]) for one in found] == [
        ("step-000220", False), ("step-000200", True), ("step-000180", False)
    ]  # fmt: skip


def test_samples_newest_first_or_of_a_step(api: httpx.Client) -> None:
    newest = api.get(f"{RUN}/rollouts", params={"limit": 3}).json()
    assert [one["step"] for one in newest["data"]] == [231, 231, 231]
    assert newest["has_more"]
    one = api.get(f"{RUN}/rollouts", params={"step": 230}).json()["data"][1]
    assert (one["step"], one["rewards"], one["reward"]) == (230, {"math": 0.0, "format": 1.0}, 0.1)
    assert (one["expected"], one["columns"]["source"], one["split"]) == ({"math": "205"}, "gsm8k", "train")


@pytest.mark.parametrize(
    ("params", "steps", "count"),
    [
        ({"data_set": "held_out"}, set(range(0, 221, 20)), 36),
        ({"data_set": "amc", "before_step": 40}, {0, 20}, 6),
        ({"data_set": "train"}, set(range(226, 232)), 24),
        ({"data_set": "no such set"}, set(), 0),
        ({"prompt_id": "amc/7", "step": 20}, {20}, 3),
        ({"search": "SQUARE is never"}, set(range(226, 232)), 6),
        ({"search": "18 rows of 24", "step": 0}, {0}, 3),
        ({"search": "100%"}, set(), 0),
        ({"search": "_"}, set(range(226, 232)) | set(range(0, 221, 20)), 60),  # in each <|im_start|>, and no wildcard
        ({"search": 'x" OR 1=1'}, set(), 0),
        ({"result": "failed"}, set(range(226, 232)), 6),
        ({"result": "failed", "reward": "format"}, set(), 0),
        ({"result": "failed", "reward": "math", "step": 231}, {231}, 1),
        ({"result": "zero"}, set(), 0),
        ({"result": "zero", "reward": "math", "data_set": "train"}, set(range(226, 232)), 6),
        ({"result": "nonzero", "reward": "math", "step": 231}, {231}, 2),
        ({"result": "nonzero", "reward": 'a "strange" name', "step": 231}, set(), 0),
        ({"result": "nonzero", "step": 220}, {220}, 3),
    ],
)
def test_samples_are_filtered(api: httpx.Client, params: dict[str, Any], steps: set[int], count: int) -> None:
    found = api.get(f"{RUN}/rollouts", params={**params, "limit": 100})
    assert found.status_code == 200, found.text
    assert {one["step"] for one in found.json()["data"]} == steps
    assert len(found.json()["data"]) == count
    assert not found.json()["has_more"]


def test_filtered_samples_have_more(api: httpx.Client) -> None:
    found = api.get(f"{RUN}/rollouts", params={"result": "failed", "limit": 2}).json()
    assert ([one["step"] for one in found["data"]], found["has_more"]) == ([231, 230], True)


@pytest.mark.parametrize("params", [{"result": "good"}, {"search": ""}, {"search": "x" * 201}, {"before_step": -1}])
def test_filters_that_are_none_are_refused(api: httpx.Client, params: dict[str, Any]) -> None:
    assert api.get(f"{RUN}/rollouts", params=params).status_code in (400, 422)


def test_usage_adds_up_and_has_its_comparisons(api: httpx.Client) -> None:
    found = api.get(f"{RUN}/usage").json()
    assert sum(row["cost_usd"] for row in found["functions"]) == pytest.approx(found["cost_usd"])
    held = [row["busy_device_s"] + row["idle_device_s"] + row["cold_device_s"] for row in found["functions"]]
    assert sum(held) == pytest.approx(found["device_s"])
    assert found["best_static"]["actors"] == 6
    assert found["planned"]["steps"] == 400
    series = api.get(f"{RUN}/metrics", params={"name": ["step_s", "cost_usd"], "points": 1000}).json()["series"]
    step_s, cost_usd = (one["values"] for name in ("step_s", "cost_usd") for one in series if one["name"] == name)
    measured = {"steps": 230, "step_s": sum(step_s[1:]) / 230, "step_usd": (cost_usd[-1] - cost_usd[0]) / 230}
    assert found["measured"] == pytest.approx(measured)


def test_logs_are_the_ends_of_both_files(api: httpx.Client) -> None:
    answer = api.get(f"{RUN}/logs", params={"lines": 2})
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert lines[0] == "==> run.log <=="
    assert [line.split()[5] for line in lines[1:3]] == ["298:", "299:"]
    assert lines[-2:] == ["==> driver.log <==", "INFO worker.py: connected to the Ray cluster"]


def test_of_a_huge_log_only_the_end_is_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.log"
    file.write_bytes(b"x" * (2 * MOST_BYTES) + b"\nlast \x1b[31mred\xff\n")
    assert tail(file, 5) == "last \\x1b[31mred\ufffd\n"
    assert tail(tmp_path / "none", 5) == ""


def test_replicas_of_runs_at_work(api: httpx.Client) -> None:
    found = api.get("/v1/functions").json()["data"]
    assert {one["run_id"] for one in found} == {filled.RUN_ID}
    assert len(found) == 7
    assert api.get("/v1/functions", params={"run_id": "none"}).json()["data"] == []


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize(
    "sort", ["created", "started", "name", "status", "progress", "reward", "held_out", "cost", "time_left"]
)
def test_runs_in_an_order_page_by_page(api: httpx.Client, sort: str, order: str) -> None:
    params = {"sort": sort, "order": order, "limit": 3}
    page = api.get("/v1/runs", params=params).json()
    found = page["data"]
    while page["has_more"]:
        page = api.get("/v1/runs", params=params | {"after": found[-1]["id"]}).json()
        found += page["data"]
    values = [_value(run, sort) for run in found]
    there = [value for value in values if value is not None]
    assert len({run["id"] for run in found}) == len(found) == 7
    assert there == sorted(there, reverse=order == "desc")
    assert values == [*there, *[None] * (len(values) - len(there))], "what is missing is last"


def _value(run: dict[str, Any], sort: str) -> Any:
    of = {
        "created": run["created_at"],
        "started": run["started_at"] or run["created_at"],
        "progress": run["step"] / run["steps"],
        "reward": run["latest"].get("reward_mean"),
        "held_out": run["latest"].get("eval/reward_mean"),
        "cost": run["cost_usd"],
        "time_left": run["left_s"],
    }
    return of[sort] if sort in of else run[sort]


def test_an_order_that_there_is_not_is_refused(api: httpx.Client) -> None:
    answer = api.get("/v1/runs", params={"sort": "colour"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "sort")


def test_devices_with_their_holders(api: httpx.Client) -> None:
    found = {one["kind"]: one for one in api.get("/v1/devices").json()["data"]}
    assert (found["cpu-core"]["total"], found["cpu-core"]["free"]) == (16, 16)
    gpus = found["h200"]
    assert (gpus["total"], gpus["free"]) == (8, 1)
    held = {one["name"]: one["held"] for one in gpus["runs"]}
    assert held == {"math-grpo": 7, "code-ppo": 0}
