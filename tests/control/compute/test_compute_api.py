"""Plans, trials of rewards, simulations and downloads, over HTTP, computed in the service's own job processes."""

from __future__ import annotations

import dataclasses
import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.fake_service import RUN, NoDrivers, Pushes, until
from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.control.service import Service
from rlhfless.scaling.prices import PriceBook, load_price_book


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    build_random(tmp_path / "model", seed=0, size=dataclasses.replace(SMALLEST, max_positions=512))
    return {
        "model": {"path": str(tmp_path / "model")},
        "prompts": {"path": str(tmp_path / "prompts.jsonl")},
        "rewards": [{"type": "exact_match"}],
        "steps": 10,
        "prompts_per_step": 8,
        "generation": {"max_tokens": 64},
    }


def test_a_plan_says_memory_time_and_cost(shared_client: httpx.Client, spec: dict[str, Any]) -> None:
    answer = shared_client.post("/v1/runs:plan", json={"spec": spec}, timeout=120)
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert (plan["chosen"]["kind"], plan["chosen"]["count"], plan["chosen"]["fits"]) == ("cpu-core", 2, True)
    predicted = plan["chosen"]["predicted"]
    assert predicted["wall_low_s"] < predicted["wall_s"] < predicted["wall_high_s"]
    assert predicted["wall_s"] == pytest.approx(10 * predicted["step_s"])
    assert predicted["cost_low_usd"] < predicted["cost_usd"] < predicted["cost_high_usd"]
    assert plan["memory"]["devices"][0]["size_bytes"] > 0
    assert plan["spec"]["placement"]["mode"] == "colocated"
    assert any("lengths_of" in text for text in plan["missing"])
    assert shared_client.get("/v1/runs").json()["data"] == [], "nothing was started"


def test_the_plan_of_demonstrations_is_of_their_lengths_and_has_no_schedules(
    shared_client: httpx.Client, spec: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "12", "response": "34"}\n' * 2 + '{"prompt": "5", "response": "6"}'
    )
    sft = {"type": "sft", "demonstrations": {"path": str(tmp_path / "rows.jsonl")}, "model": spec["model"], "steps": 10}
    answer = shared_client.post("/v1/runs:plan", json={"spec": sft}, timeout=120)
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert plan["lengths"] == f"3 of the 3 rows of {tmp_path / 'rows.jsonl'}"
    assert plan["schedules"] == []
    predicted = plan["chosen"]["predicted"]
    assert predicted["wall_low_s"] < predicted["wall_s"] == pytest.approx(10 * predicted["step_s"])
    asked = {"spec": sft, "devices": ["8xh100", "1xl40s"]}
    rows = shared_client.post("/v1/runs:compare", json=asked, timeout=240).json()["rows"]
    assert {(row["kind"], row["placement"], row["reason"]) for row in rows} == {
        ("h100", "co-located", None),
        ("l40s", "co-located", None),
    }
    assert {tuple(row["shares"]) for row in rows} == {("learner",)}


def test_devices_and_placements_are_compared(shared_client: httpx.Client, spec: dict[str, Any]) -> None:
    asked = {"spec": spec, "devices": ["4xh100", "1xl40s"]}
    answer = shared_client.post("/v1/runs:compare", json=asked, timeout=240)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["rows"]
    assert {(row["kind"], row["count"], row["placement"]) for row in rows} == {
        ("h100", 4, "co-located"),
        ("h100", 4, "1 learn"),
        ("h100", 4, "1 learn, 1 ahead"),
        ("h100", 4, "2 learn"),
        ("h100", 4, "2 learn, 1 ahead"),
        ("l40s", 1, "co-located"),
    }
    best = [row["predicted"] for row in rows if row["on_front"]]
    assert [row["on_front"] for row in rows] == [True] * len(best) + [False] * (len(rows) - len(best))
    for row in rows:
        cost = row["predicted"]
        assert row["step_usd"] == pytest.approx(cost["cost_usd"] / cost["steps"])
        assert row["energy_kwh"] > 0
        assert max(row["shares"].values()) <= 1.0
        no_worse = [each for each in best if each["wall_s"] <= cost["wall_s"] and each["cost_usd"] <= cost["cost_usd"]]
        assert no_worse, "what is not on the front is slower and dearer than one that is"
    late = shared_client.post("/v1/runs:compare", json=asked | {"deadline_s": best[0]["wall_s"]}, timeout=240).json()[
        "rows"
    ]
    kept = [row["predicted"]["wall_s"] <= best[0]["wall_s"] for row in late]
    assert kept == sorted(kept, reverse=True), "what keeps the deadline comes first"
    assert shared_client.get("/v1/runs").json()["data"] == [], "nothing was started"


def test_devices_that_refuse_the_number_format_have_no_price(shared_client: httpx.Client, spec: dict[str, Any]) -> None:
    asked = {"spec": spec | {"learner": {"dtype": "float32"}}, "devices": ["2xh100"]}
    rows = shared_client.post("/v1/runs:compare", json=asked, timeout=120).json()["rows"]
    for row in rows:
        assert (row["fits"], row["predicted"], row["nearest_change"]) == (False, None, None)
        assert "placement.float32_on_gpus: true" in row["problems"][0]


@pytest.mark.parametrize(
    ("question", "param"),
    [
        ({"spec": {"steps": 0}}, "model"),
        ({}, "spec"),
        ({"spec": {}, "device": ["8xh100"]}, "device"),
    ],
)
def test_a_wrong_question_is_refused(shared_client: httpx.Client, question: dict[str, Any], param: str) -> None:
    answer = shared_client.post("/v1/runs:plan", json=question)
    assert answer.status_code == 422
    assert param in {problem["param"] for problem in answer.json()["error"]["problems"]}


def test_devices_that_do_not_exist_are_named(shared_client: httpx.Client, spec: dict[str, Any]) -> None:
    devices = ["8xh100", "8xh1000", "/etc", f"{10**30}xh100"]
    answer = shared_client.post("/v1/runs:compare", json={"spec": spec, "devices": devices}, timeout=60)
    assert answer.status_code == 422
    problems = answer.json()["error"]["problems"]
    assert [problem["param"] for problem in problems] == ["devices.1", "devices.2", "devices.3"]
    assert "h1000" in answer.json()["error"]["message"]


def test_a_kind_of_the_spec_that_does_not_exist_is_named(shared_client: httpx.Client, spec: dict[str, Any]) -> None:
    answer = shared_client.post("/v1/runs:plan", json={"spec": spec | {"placement": {"kind": "h1000"}}}, timeout=60)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["param"] == "placement.kind"
    assert "nothing is known of device kind 'h1000'; did you mean `h100`?" in error["message"]


def test_devices_that_were_asked_for_and_cannot_be_have_a_row_that_says_why(
    shared_client: httpx.Client, spec: dict[str, Any]
) -> None:
    two = spec | {"scaling": {"generation": {"min_actors": 2, "max_actors": 2}}}
    asked = {"spec": two, "devices": ["1xh100"]}
    rows = shared_client.post("/v1/runs:compare", json=asked, timeout=120).json()["rows"]
    assert [(row["kind"], row["count"], row["fits"]) for row in rows] == [("h100", 1, False)]
    assert "scaling.generation.max_actors is 2" in rows[0]["problems"][0]


def test_rewards_are_tried(shared_client: httpx.Client) -> None:
    question = {
        "rewards": [{"type": "exact_match", "weight": 2.0}, {"type": "regex", "name": "digit", "pattern": r"\d"}],
        "samples": [
            {"prompt": "2+2=", "response": "4", "answer": "4"},
            {"prompt": "2+2=", "response": "four", "answer": "4"},
        ],
    }
    answer = shared_client.post("/v1/rewards:test", json=question, timeout=60)
    assert answer.status_code == 200, answer.text
    assert [row["parts"] for row in answer.json()["data"]] == [
        {"exact_match": 1.0, "digit": 1.0},
        {"exact_match": 0.0, "digit": 0.0},
    ]
    assert [row["reward"] for row in answer.json()["data"]] == [3.0, 0.0]
    code = question | {"rewards": [{"type": "python", "target": "os:system"}]}
    refused = shared_client.post("/v1/rewards:test", json=code)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "rewards.0.target")


def test_no_schema_makes_the_service_ask_another_server(shared_client: httpx.Client, listener: Any) -> None:
    elsewhere = {"type": "json_schema", "json_schema": {"$ref": f"{listener.url}/s.json"}}
    of_rows = {"type": "json_schema", "schema_field": "schema"}
    sample = {"prompt": "p", "response": "{}", "schema": elsewhere["json_schema"]}
    for reward, where in ((elsewhere, "rewards.0"), (of_rows, "rewards.0")):
        answer = shared_client.post("/v1/rewards:test", json={"rewards": [reward], "samples": [sample]}, timeout=60)
        assert answer.status_code == 422, answer.text
        assert "is not in the schema itself" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"].startswith(where)
    assert shared_client.post("/v1/runs", json=RUN | {"rewards": [elsewhere]}).status_code == 422
    assert listener.connections == 0


MACHINES = {"kind": "h100", "devices_per_node": 4}
SCENARIO = {
    "name": "small",
    "cluster": {"machines": [MACHINES]},
    "model": {"name": "qwen2.5-0.5b"},
    "workload": {
        "type": "lognormal",
        "lengths": {"median_tokens": 100, "spread": 0.5, "persistence": 0.5},
        "prompts": 64,
        "median_prompt_tokens": 50,
        "source": "of this test",
    },
    "prompts_per_step": 16,
    "samples_per_prompt": 4,
    "max_tokens": 400,
    "steps": 3,
    "seeds": 2,
    "policies": [{"name": "static"}, {"name": "cost_aware"}],
}


def test_a_simulation_is_queued_and_answered(client: httpx.Client) -> None:
    answer = client.post("/v1/simulations", json={"scenario": SCENARIO})
    assert answer.status_code == 202, answer.text
    simulation = answer.json()["id"]
    ended = until(lambda: _ended(client, simulation), 120)
    assert ended["status"] == "succeeded", ended
    assert [row["label"] for row in ended["result"]["rows"]] == ["static", "cost_aware"]
    assert client.get("/v1/simulations/none").status_code == 404


@pytest.mark.parametrize(
    ("question", "param"),
    [
        ({}, "scenario"),
        ({"scenario": SCENARIO, "run": "some"}, "scenario"),
        ({"scenario": SCENARIO | {"steps": 0}}, "steps"),
        ({"scenario": SCENARIO | {"steps": 10**9}}, "steps"),
        ({"scenario": SCENARIO | {"cluster": {"machines": [MACHINES | {"nodes": 2**31}]}}}, "cluster.machines.0"),
        ({"scenario": SCENARIO | {"scoring": {"cores": 2**31}}}, "scoring.cores"),
        ({"scenario": SCENARIO, "policies": ["statik"]}, "policies"),
        ({"scenario": SCENARIO | {"workload": {"type": "azure", "path": "/etc/passwd"}}}, "workload.path"),
        ({"scenario": SCENARIO | {"cluster": SCENARIO["cluster"] | {"devices": "/etc/passwd"}}}, "cluster.devices"),
        ({"scenario": SCENARIO | {"cluster": SCENARIO["cluster"] | {"prices": "/etc/passwd"}}}, "cluster.prices"),
        ({"scenario": SCENARIO | {"policies": [{"name": "antigravity:x"}]}}, "policies.0.name"),
        ({"run": "some", "policies": ["antigravity:x"]}, "policies.0"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused_at_once(
    shared_client: httpx.Client, question: dict[str, Any], param: str
) -> None:
    """Among them files of the machine, and code, which is not imported."""
    answer = shared_client.post("/v1/simulations", json=question, timeout=60)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["param"] == param
    assert shared_client.get("/v1/simulations").json()["data"] == []


def _ended(client: httpx.Client, simulation: str) -> dict[str, Any] | None:
    found: dict[str, Any] = client.get(f"/v1/simulations/{simulation}").json()
    return found if found["status"] in ("succeeded", "failed") else None


def test_checkpoints_and_traces_are_downloaded_whole(
    service: tuple[httpx.Client, Service], drivers: NoDrivers, spec: dict[str, Any]
) -> None:
    client, _ = service
    run = client.post("/v1/runs", json=spec).json()["id"]
    until(lambda: drivers.orders)
    assert client.get(f"/v1/runs/{run}/trace").status_code == 404
    folder = service[1].settings.runs / run / "checkpoints" / "step-000005"
    (folder / "inner").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "inner" / "weights.bin").write_bytes(bytes(range(256)) * 9000)
    push = Pushes(client, drivers.orders[0])
    entry = {"id": "step-000005", "step": 5, "location": str(folder), "best": True, "score": 1.0, "created_at": 1.0}
    push(("checkpoints", {"checkpoints": [entry]}))
    answer = client.get(f"/v1/runs/{run}/checkpoints/step-000005/download")
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        names = tar.getnames()
        assert names == [f"{run}-step-000005/inner/weights.bin", f"{run}-step-000005/run.json"]
        content = tar.extractfile(names[0])
        assert content is not None
        assert content.read() == bytes(range(256)) * 9000
    assert client.get(f"/v1/runs/{run}/checkpoints/step-000009/download").status_code == 404
    shutil.rmtree(folder)
    gone = client.get(f"/v1/runs/{run}/checkpoints/step-000005/download")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["", "a{99999999999}", "(" * 5000])
def test_a_model_that_no_hub_can_have_is_refused_by_a_plan(
    client: httpx.Client, spec: dict[str, Any], path: str
) -> None:
    answer = client.post("/v1/runs:plan", json={"spec": spec | {"model": {"path": path}}}, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "model.path")


@pytest.mark.parametrize("kind", [[], {}, [[[]]]])
def test_a_kind_of_workload_that_is_no_text_is_refused(client: httpx.Client, kind: Any) -> None:
    answer = client.post("/v1/simulations", json={"scenario": {"workload": {"type": kind}}}, timeout=60)
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("limit", [0, -1, 1001, 2.5, "many", True])
def test_a_limit_that_is_none_is_refused(shared_client: httpx.Client, spec: dict[str, Any], limit: object) -> None:
    answer = shared_client.post("/v1/runs:compare", json={"spec": spec, "limit": limit}, timeout=60)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "limit"


def test_without_devices_those_that_are_there_and_the_best_are_compared(
    shared_client: httpx.Client, spec: dict[str, Any], tmp_path: Path
) -> None:
    book = load_price_book(None)
    prices = PriceBook.model_validate({"devices": [book.device(kind) for kind in ("cpu-core", "h100", "l40s")]})
    (tmp_path / "prices.json").write_text(prices.model_dump_json())
    asked = {"spec": spec | {"scaling": {"prices": str(tmp_path / "prices.json")}}, "limit": 8}
    found = shared_client.post("/v1/runs:compare", json=asked, timeout=240).json()
    assert len(found["rows"]) == 8
    assert found["left_out"] == found["tried"] - 8 > 0
    assert {(row["kind"], row["count"]) for row in found["rows"]} <= {
        ("cpu-core", 2),
        ("h100", 1),
        ("h100", 8),
        ("l40s", 1),
        ("l40s", 8),
    }
    assert found["rows"][0]["on_front"]
