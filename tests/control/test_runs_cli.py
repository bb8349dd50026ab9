"""`rlhfless runs`: every command, for people and as JSON, and its exit codes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from fakes.fake_service import RUN, SAMPLE, NoDrivers, Pushes, until
from rlhfless.cli.main import app
from rlhfless.client import calls

Cli = Callable[..., Result]

ERROR = {"code": "invalid", "message": "prompts.path: no such file", "param": "prompts.path", "problems": []}


@pytest.fixture
def cli(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv(calls.URL, str(client.base_url))
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(app, ["runs", *words])
        assert result.exit_code == code, (words, result.output, result.exception)
        return result

    return call


@pytest.fixture
def spec(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN | {"metadata": {"team": "a"}}))
    return str(file)


def parsed(result: Result) -> Any:
    return json.loads(result.stdout)


def end(client: httpx.Client, drivers: NoDrivers, status: str, error: Any = None) -> str:
    until(lambda: drivers.orders)
    push = Pushes(client, drivers.orders[-1])
    push(("metrics", {"step": 1, "kind": "step", "values": {"step_s": 1.0, "reward_mean": 0.5}}))
    push(("ended", {"status": status, "reason": "over\nand out", "error": error, "retry": False}))
    return drivers.orders[-1].run_id


def test_a_run_is_made_shown_steered_and_deleted(cli: Cli, spec: str, client: httpx.Client, drivers: NoDrivers) -> None:
    run = parsed(cli("create", spec, "--set", "steps=3", "--idempotency-key", "one", "--json"))
    assert (run["object"], run["steps"]) == ("run", 3)
    assert run["id"] in cli("create", spec, "--set", "steps=3", "--idempotency-key", "one").stdout
    until(lambda: drivers.orders)
    for words, status in ((["pause"], "pausing"), (["resume"], "validating"), (["cancel"], "cancelling")):
        for _ in range(2):
            found = parsed(cli(*words, run["id"], "--json"))
            assert found["status"] == status or status == "validating"
    assert "cancelled; its driver shuts down" in cli("events", run["id"]).stdout
    end(client, drivers, "cancelled")
    assert parsed(cli("show", "last", "--json"))["status"] == "cancelled"
    assert [one["id"] for one in parsed(cli("list", "--json", "--label", "team=a"))["data"]] == [run["id"]]
    assert parsed(cli("list", "--json", "--status", "running"))["data"] == []
    table = cli("list").stdout
    assert len(table.splitlines()) == 2, "a reason of several lines is one line here"
    for command in ("usage", "events", "checkpoints"):
        assert parsed(cli(command, run["id"], "--json"))["object"] in ("usage", "list")
        cli(command, run["id"])
    assert parsed(cli("logs", run["id"], "--json")) == {"run_id": run["id"], "lines": []}
    assert parsed(cli("delete", run["id"], "--json")) == {"id": run["id"], "deleted": True}
    assert "no run" in cli("show", run["id"], code=2).stderr


def test_fleets_are_shown_with_a_bill_that_adds_up(
    cli: Cli, spec: str, client: httpx.Client, drivers: NoDrivers
) -> None:
    assert "no run has shared engines" in cli("fleets").stdout
    run = parsed(cli("create", spec, "--json"))["id"]
    until(lambda: drivers.orders)
    engine = {"fleet": "f1", "engine": "fleet-f1-0", "incarnation": "i", "terms": {"model.path": "m"}, "slots": 8,
              "kind": "h100", "devices": 1, "started_s": 10.0, "up_s": 20.0, "now_s": time.time(),
              "runs": {run: {"busy_s": 30.0, "running": 4}, "other": {"busy_s": 10.0, "present": False}}}  # fmt: skip
    Pushes(client, drivers.orders[-1])(fleet=[engine])
    shown = [line.split() for line in cli("fleets").stdout.splitlines()]
    assert shown[0][:3] == ["fleet", "f1", "m"]
    assert [run, "30.0", "75", "0", "4"] in shown
    assert ["other", "(left)", "10.0", "25"] in shown
    assert [line[0] for line in shown[-3:]] == ["idle", "starts", "provisioned"]
    assert parsed(cli("fleets", "--json"))["data"][0]["object"] == "fleet"


def test_samples_are_printed_and_filtered(cli: Cli, spec: str, client: httpx.Client, drivers: NoDrivers) -> None:
    run = parsed(cli("create", spec, "--json"))["id"]
    until(lambda: drivers.orders)
    push = Pushes(client, drivers.orders[-1])
    failed = SAMPLE | {"failures": {"judge": "no answer in 30 s"}, "response": "<think>\x1b[2J</think>"}
    push(("rollouts", {"step": 1, "samples": [SAMPLE | {"expected": {"math": "205"}}, failed]}))
    push(("held_out_rollouts", {"step": 1, "samples": [SAMPLE | {"split": "held_out", "greedy": True}]}))
    output = cli("samples", run).stdout
    for line in ("step 1, prompt p", "math expects: 205", "judge failed: no answer in 30 s", "<think>\\x1b[2J</think>"):
        assert f"{line}\n" in output
    assert "step 1, held out, prompt p" in output
    assert "greedy: reward" in output
    for options, count in {
        "--failed": 1,
        "--dataset held_out": 1,
        "--search <THINK": 1,
        "--step 2": 0,
        "--limit 2": 2,
    }.items():
        assert len(parsed(cli("samples", run, *options.split(), "--json"))["data"]) == count, options


@pytest.mark.parametrize(("status", "code"), [("succeeded", 0), ("failed", 3), ("cancelled", 5), ("paused", 5)])
@pytest.mark.parametrize("as_json", [False, True])
def test_watching_ends_with_what_became_of_the_run(
    cli: Cli, spec: str, client: httpx.Client, drivers: NoDrivers, status: str, code: int, as_json: bool
) -> None:
    cli("create", spec)
    run = end(client, drivers, status, ERROR if status == "failed" else None)
    shown = cli("watch", run, *(["--json"] if as_json else []), code=code).stdout
    if as_json:
        assert [json.loads(line)["object"] for line in shown.splitlines()].count("event") >= 3
    else:
        assert "step 1/5" in shown


def test_watching_a_resumed_run_goes_on_after_its_pause(
    cli: Cli, spec: str, client: httpx.Client, drivers: NoDrivers
) -> None:
    cli("create", spec)
    run = end(client, drivers, "paused", ERROR)
    assert parsed(cli("show", run, "--json"))["error"]["code"] == ERROR["code"]
    cli("resume", run)
    assert parsed(cli("show", run, "--json"))["error"] is None
    until(lambda: len(drivers.orders) == 2)
    push = Pushes(client, drivers.orders[-1])
    push.seq = 2
    push(("metrics", {"step": 2, "kind": "step", "values": {"step_s": 1.0, "reward_mean": 0.5}}))
    push(("ended", {"status": "paused", "reason": "paused again", "error": None, "retry": False}))
    shown = cli("watch", run, code=5).stdout
    assert "step 1/5" in shown
    assert "step 2/5" in shown


def test_a_run_is_named_by_a_part_of_its_id_or_its_name(cli: Cli, spec: str) -> None:
    first, second = (parsed(cli("create", spec, "--set", f"name={name}", "--json"))["id"] for name in ("ab", "abc"))
    same = [parsed(cli("create", spec, "--set", "name=twin", "--json"))["id"] for _ in range(2)]
    for named, run in {
        first: first,
        "ab": first,  # the name of one, though the beginning of both ids
        "ab-": first,
        "a": None,
        "abc": second,
        second[-8:]: second,
        second[-8:-2]: second,
        f"runs/{second}/": second,
        same[0][:-2]: same[0] if same[0][:-2] != same[1][:-2] else None,
        "twin": None,
    }.items():
        if run is not None:
            assert parsed(cli("show", named, "--json"))["id"] == run, named
        else:
            message = cli("show", named, code=2).output
            assert re.search(r"means \d+ runs: ", message)  # the ends of ids are random
            assert "write more of the id" in message.replace("\n", " ")
    assert "'nothing'" in cli("show", "nothing", code=2).output
    assert parsed(cli("cancel", "abc", "--json"))["status"] in ("cancelling", "cancelled")


def test_what_cannot_be_is_said_in_one_message(cli: Cli, spec: str) -> None:
    for words, text in (
        (["create", "none.yaml"], "none.yaml"),
        (["create", spec, "--set", "stepz=3"], "stepz"),
        (["create", spec, "--set", "model.path=/etc"], "below none of the service's roots"),
        (["show", "none"], "there is no run 'none'"),
        (["logs", "none"], "there is no run 'none'"),
        (["list", "--status", "walking"], "walking"),
        (["list", "--label", "team"], "NAME=VALUE"),
        (["list", "--limit", "0"], "--limit"),
        (["show", "last"], "the service has no run"),
        (["plan", spec, "--lengths-of", "none"], "there is no run 'none'"),
        (["plan", spec, "--set", "steps=0"], "steps"),
    ):
        result = cli(*words, code=2)
        assert text in result.stderr, (words, result.stderr)
        assert "Traceback" not in result.stderr


def test_a_service_that_is_away_is_exit_code_4(cli: Cli, spec: str) -> None:
    for words in (["list"], ["create", spec], ["show", "last"], ["plan", spec]):
        assert "rlhfless up" in cli(*words, "--url", "http://127.0.0.1:9", code=4).stderr
