"""`rlhfless selftest` on this machine with a run's model, and `rlhfless plan --measured` with its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhfless.bundled import Recipe, WarmStartRecipe, build
from rlhfless.cli.main import app
from rlhfless.prediction.simulated import Lengths
from rlhfless.selftest.check import opened
from rlhfless.selftest.report import latency_at
from rlhfless.selftest.steps import compared
from rlhfless.sim.replay.latency_file import LatencyFile

LATENCY: dict[str, Any] = {
    "traces": ["selftest"], "steps": 1, "device_kind": "cpu-core", "ranks": 1,
    "generation": {"fixed_s": 0.02, "sequence_s": [0.001] * 3, "context_s": 0.0, "prefill_token_s": 1e-4,
                   "prefill_context_s": 0.0},
    "call_s": 0.0, "load_weights_s": 0.1, "start_s": 20.0, "group_s": 0.0, "learn": {"fixed_s": 0.0, "token_s": 1e-4},
    "publish_s": 0.1, "driver_s": 0.0, "mean_s": {}, "evaluate": {"fixed_s": 0.0, "token_s": 3e-5},
}  # fmt: skip


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    paths = build(folder / "tiny", recipe=Recipe(warm_start=WarmStartRecipe(steps=0)))
    values = {
        "name": "mine",
        "model": {"path": str(paths.model)},
        "prompts": {"path": str(paths.train), "id_field": "id"},
        "rewards": [{"type": "exact_match"}],
        "prompts_per_step": 8,
        "samples_per_prompt": 8,
        "generation": {"max_tokens": 64, "engine": {"kv_cache_gib": 0.25}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def report(folder: Path, model: str, latency: dict[str, Any] | None) -> Path:
    node = {"model": model, "devices": {"kind": "cpu-core", "count": 2}, "latency": latency}
    (folder / "report.json").write_text(json.dumps({"nodes": {"this machine": node}}))
    return folder / "report.json"


def planned(spec: Path, measured: Path) -> Any:
    return CliRunner().invoke(
        app, ["plan", str(spec), "--devices", "1xcpu-core", "--measured", str(measured), "--json"]
    )


def step_s(spec: Path, measured: Path) -> float:
    done = planned(spec, measured)
    assert done.exit_code == 0, done.output
    return float(json.loads(done.stdout)["predicted"]["step_s"])


def test_a_plan_goes_by_what_was_measured(spec: Path, tmp_path: Path) -> None:
    model = yaml.safe_load(spec.read_text())["model"]["path"]
    as_measured = step_s(spec, report(tmp_path, model, LATENCY))
    slower = LATENCY | {"generation": LATENCY["generation"] | {"fixed_s": 0.2}}
    assert step_s(spec, report(tmp_path, model, slower)) > 2 * as_measured


def test_a_plan_of_turns_goes_by_measured_sleep_and_wakes(spec: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(spec.read_text()) | {"placement": {"turns": True, "devices": 1}}
    (tmp_path / "turns.yaml").write_text(yaml.safe_dump(values))
    steps = [
        step_s(tmp_path / "turns.yaml", report(tmp_path, values["model"]["path"], LATENCY | {"turns": turns}))
        for turns in ({}, {"learner": {"sleep_s": 2.0, "wake_s": 3.0}})
    ]
    assert steps[1] - steps[0] == pytest.approx(5.0, abs=0.1)


def test_a_tiny_step_is_not_made_up_to_what_data_sheets_and_assumed_overheads_say(spec: Path, tmp_path: Path) -> None:
    model = yaml.safe_load(spec.read_text())["model"]["path"]
    quick = LATENCY | {
        "generation": LATENCY["generation"] | {"fixed_s": 1e-4, "sequence_s": [0.0] * 3, "prefill_token_s": 0.0},
        "load_weights_s": 0.01, "publish_s": 0.02, "learn": {"fixed_s": 0.0, "token_s": 5e-5},
    }  # fmt: skip
    tokens = 64 * (256 + 18)  # 16 in the median; the learner computes shared prompts once
    assert 0.03 < step_s(spec, report(tmp_path, model, quick)) < 0.03 + (5e-5 + 3e-5) * tokens


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "is no report of a self-test"),
        ('{"nodes": {"a": {"model": "m", "devices": {"kind": "h100"}, "latency": {"ranks": 1}}}}', "m on h100"),
        ('{"nodes": {"a": {"model": "m", "devices": {"kind": "h100"}, "latency": null}}}', "no speed"),
    ],
)
def test_a_report_of_something_else_is_refused(spec: Path, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "report.json").write_text(text)
    done = planned(spec, tmp_path / "report.json")
    assert done.exit_code == 2
    assert says in done.output
    assert "rlhfless selftest" in done.output


def test_a_measured_step_is_compared_with_what_the_plan_says_of_its_lengths() -> None:
    """20 iterations of 16 samples, 36 ms each, 160 prompt tokens; 480 tokens learned; load and publication. The
    simulated step has the driver's own time beside them."""
    own = {"publish_s": 0.1, "load_s": 0.1, "generation_s": 0.8, "learn_s": 0.05, "step_s": 1.05}
    drawn = {"prompts": 2, "prompt_tokens": 10, "response_tokens": [20] * 16}
    latency = LatencyFile.model_validate({key: value for key, value in LATENCY.items() if key != "ranks"})
    with opened(None) as subject:
        assert compared(subject, lambda _: latency) is None
        subject.results["step"] = own | drawn
        found = compared(subject, lambda _: latency)
    assert found is not None
    assert found["predicted_s"] == pytest.approx(20 * 0.036 + 160 * 1e-4 + 480 * 1e-4 + 0.2, rel=0.2)
    assert (found["samples"], found["step_s"], found["reason"]) == (16, 1.05, None)


def test_siblings_compute_their_prompt_once_in_the_measured_speeds() -> None:
    """Eight samples of 300 + 100 tokens compute 1,100 of 3,200; the measured batch, four of 1 + 1, computes 5 of 8."""
    measured = {
        "iterations": [(1.0, 0.02), (32.0, 0.05)], "prefill_token_s": 8e-5, "rank_tokens_per_s": 1000.0, "ranks": 2,
        "load_s": 0.1, "publish_s": 0.1, "start": {"import": 3.0},
    }  # fmt: skip
    lengths = Lengths(100.0, 100.0, 0.1, 300.0, "given", known=True)
    with opened(None) as subject:
        assert subject.spec.samples_per_prompt == 8
        subject.results |= measured
        padded = latency_at(subject, lengths)
        subject.results["packs"] = True
        packed = latency_at(subject, lengths)
    assert padded.generation.prefill_token_s == pytest.approx(1e-5)
    assert padded.learn.token_s == pytest.approx(1 / 2000)
    assert packed.learn.token_s == pytest.approx(1 / 2000 * (1100 / 3200) / (5 / 8))


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.seldom
@pytest.mark.timeout(900)
def test_on_this_machine(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["selftest", str(spec), "--out", str(out)])
    assert done.exit_code == 0, done.output
    (node,) = json.loads(out.read_text())["nodes"].values()
    states = {check["name"]: check["state"] for check in node["checks"]}
    on_gpus = {"driver", "offload", "collectives", "fused head", "compiled layers", "engine over two GPUs"}
    assert {name for name, state in states.items() if state == "not applicable"} == on_gpus
    measured = {check["name"]: check["measured"] for check in node["checks"]}
    for name in ("probe", "restart", "learner after engine"):
        assert measured[name]["read_back_tensors"] == measured[name]["tensors"] > 0
    assert measured["moved sample"]["with_the_same_tokens"] == measured["moved sample"]["samples"] > 0
    assert step_s(spec, out) > 0
    assert node["step"]["predicted"]["step_s"] > 0
    assert node["step"]["measured"]["step_s"] > 0
    assert node["step"]["measured"]["predicted_s"] > 0
    assert measured["engine"]["attention"] == "CPU_ATTN"
