"""Every benchmark runs at its smallest size and prints what docs/benchmarks.md is made of. No figure is judged."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from where import machine

from rlhfless.bundled.model import ModelSize, build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems, write_jsonl

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 800
MODEL, RUNS, STEPS = "model", "measured_runs", "published_steps"
"""Fixtures with what a command line must name."""


@dataclass(frozen=True)
class Smoke:
    """A benchmark, and what it must print: regular expressions."""

    name: str
    table: tuple[str, ...]
    needs: str | None = None
    """The fixture with the arguments that it needs beside `--smoke`."""
    long: bool = False
    """It takes more than 15 s."""
    alone: bool = False
    """It starts processes or a browser, and so has a process of its own."""

    @property
    def case(self) -> Any:
        return pytest.param(self, id=self.name, marks=[pytest.mark.long] * self.long)


NUMBER = r"-?\d+\.\d+"
PURE = (
    Smoke("by_the_second", (rf"\| gsm8k-7b-a100 \| {NUMBER} at {NUMBER}x \| {NUMBER} \|",)),
    Smoke("anchors", (r"refused: `mamba_num_heads`", rf"median error {NUMBER}% of 1, worst", r"\| 4B \| 0\.14 s \|")),
    Smoke("step_computed", (rf"\| step \| {NUMBER} \| {NUMBER} \|",)),
    Smoke("change_computed", (rf"\| change \| {NUMBER} \| {NUMBER} \|",)),
    Smoke("weights_computed", (rf"\| `nccl` \| {NUMBER} \| {NUMBER} \|",)),
    Smoke("latency", (rf"first +roofline +{NUMBER}%", rf"second +other model +{NUMBER}%"), RUNS),
    Smoke(
        "learner",
        ('"ours": ', '"plain": ', rf'"speed_ratio": {{\s+"wall": {NUMBER}', rf'"memory_ratio": {NUMBER}'),
        long=True,
    ),
    Smoke("overlap", (rf"Staleness 1: where the plan decides {NUMBER}x", r"\| gsm8k-3b-h100 \| one_step_off \|")),
    Smoke("waits", (r"\| 0 s \| kept \|", rf"\| 10 s \| parked \| \d+ \| {NUMBER} \|")),
    Smoke(
        "policies",
        (
            rf"`cost_aware` is {NUMBER}x as fast at the median",
            rf"The best arrangement at the median: 2 runs {NUMBER}x, 4 runs {NUMBER}x, 8 runs {NUMBER}x",
            r"\| gsm8k-3b-h100 \|",
        ),
        long=True,
    ),
    Smoke("rl_steps", (rf"first +{NUMBER} s +[+-]{NUMBER}%", rf"left out: median error {NUMBER}%"), STEPS),
    Smoke(
        "simulator", (r"[\d,]+ responses/s: \d+ in", r"static +\d+ s of processor", r"cost_aware +\d+ s of processor")
    ),
)
LIVE = (
    Smoke(
        "api", (rf"ready with Ray after {NUMBER} s", rf"events on 2 streams +p50 +{NUMBER} ms", "5 of 5 queued"), MODEL
    ),
    Smoke("chaos", (r"token-identical samples +\d+ of \d+", rf"kills +1\n.* -> .*: {NUMBER}x"), MODEL),
    Smoke("controls", (rf"shuffled +0 +{NUMBER} +{NUMBER} +[+-]{NUMBER}",), MODEL),
    Smoke(
        "prefix_steps",
        (rf"long +step_s +off +{NUMBER} s +on +{NUMBER} s", rf"an actor that joins in mid-step {NUMBER}"),
    ),
    Smoke(
        "schedules", tuple(rf"{name} +{NUMBER} .*\) +{NUMBER} +{NUMBER}" for name in ("sync", "one_step_off", "async"))
    ),
    Smoke(
        "runs_in_a_fleet",
        ("last weights equal", rf"tokens/s +together .* {NUMBER}x", rf"join {NUMBER} s", rf"bill: {NUMBER} device"),
        MODEL,
    ),
    Smoke("runs_together", (r"duty \d+%", "last weights equal", rf"throughput +together .* {NUMBER}x"), MODEL),
    Smoke(
        "step",
        (
            rf"our step / bare parts, two pinned engines +{NUMBER}",
            rf"our step / bare parts, one default engine +{NUMBER}",
            rf"TRL / our step +{NUMBER}",
        ),
    ),
    Smoke("router_replay", (r"\| bfloat16 \| without \| \d", r"\| bfloat16 \| with \| .* \| replayed \|")),
    Smoke("speculation", (rf"misses +4 sequences: off / on {NUMBER}; identical 1\.000000 of \d+ tokens",)),
    Smoke(
        "weights",
        tuple(rf"{row} .* ratio {NUMBER}" for row in ("store: publish", "two: http", "two: nccl", "tiny: load")),
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `rlhfless models tiny` writes, with weights that were taught nothing."""
    folder = tmp_path_factory.mktemp("model")
    build_random(folder / "model", seed=0, size=ModelSize())
    for name, count in (("train", 40), ("heldout", 2)):
        problems = draw_problems(TaskRecipe(), np.random.default_rng(count), count, held_out=name == "heldout")
        write_jsonl(folder / f"{name}.jsonl", problems)
    return [str(folder)]


@pytest.fixture(scope="module")
def measured_runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two runs of two models as LLMServingSim's `bench` writes them: a token takes so many seconds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, of, token_s in (("first", "meta-llama/Llama-3.1-8B", 0.01), ("second", "Qwen/Qwen3-32B", 0.03)):
        (folder / name).mkdir()
        settings = {"tensor_parallel_size": 1, "max_num_seqs": 16}
        (folder / name / "meta.json").write_text(
            json.dumps({"model": of, "vllm_version": "0.28.0", "engine_kwargs": settings})
        )
        rows = [
            {"input_toks": 100 + i, "output_toks": 20 + i, "queued_ts": i, "scheduled_ts": i}
            | {"last_token_ts": i + token_s * (20 + i)}
            for i in range(40)
        ]
        (folder / name / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [str(folder)]


@pytest.fixture(scope="module")
def published_steps(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three steps, made up."""
    path = tmp_path_factory.mktemp("steps") / "steps.csv"
    columns = "id,model,devices,kind,generation_tp,prompts,samples,mean_response_tokens,max_response_tokens"
    rows = (
        "8,h100,1,16,4,200,1024,sync,20",
        "8,mi300x,,16,4,200,1024,sync,25",
        "8,h100,1,16,4,200,1024,one_step_off,18",
    )
    named = zip(("first", "second", "third"), rows, strict=True)
    lines = (f"{name},Llama-3.1-8B,{row}" for name, row in named)
    path.write_text("\n".join([f"{columns},schedule,step_s", *lines]))
    return [str(path)]


def output(command: Sequence[str | Path]) -> str:
    """What a command prints; it must end with 0."""
    ran = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-8000:]}"
    return ran.stdout


def needed(smoke: Smoke, request: pytest.FixtureRequest) -> list[str]:
    """What its command line has beside `--smoke`."""
    found: list[str] = request.getfixturevalue(smoke.needs) if smoke.needs else []
    return found


def check(smoke: Smoke, printed: str) -> None:
    assert machine() in printed
    for expected in smoke.table:
        assert re.search(expected, printed), f"{expected!r} is not in\n{printed}"


Printed = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a benchmark prints in this process, which has imported most of what it needs: a process takes seconds."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        assert not importlib.import_module(name).main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("smoke", [smoke.case for smoke in PURE])
def test_without_engines(smoke: Smoke, request: pytest.FixtureRequest, printed: Printed) -> None:
    arguments = [*needed(smoke, request), "--smoke"]
    apart = smoke.alone or smoke.long
    check(smoke, output([BENCHMARKS / f"{smoke.name}.py", *arguments]) if apart else printed(smoke.name, *arguments))


def test_what_actors_drafts_and_both_bring(printed: Printed) -> None:
    check(
        Smoke("policies", (rf"\| gsm8k-3b-h100( \| {NUMBER}){{6}}",)),
        printed("policies", "--drafts", "--jobs", "1", "--smoke"),
    )


def test_a_missing_peer_is_said(measured_runs: list[str], monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    text = printed("latency", *measured_runs)
    assert re.search(r"^kernels +skipped: aiconfigurator-core is not installed", text, flags=re.MULTILINE)
    assert "roofline" in text


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("smoke", LIVE, ids=lambda smoke: smoke.name)
def test_with_an_own_fleet(smoke: Smoke, request: pytest.FixtureRequest) -> None:
    check(smoke, output([BENCHMARKS / f"{smoke.name}.py", *needed(smoke, request), "--smoke"]))


def test_the_tables_are_complete() -> None:
    """A new benchmark runs here, too; what has no option `--smoke` is a part of another one."""
    found = {file.stem for file in BENCHMARKS.glob("*.py") if "from smoke import" in file.read_text()}
    assert found == {smoke.name for smoke in (*PURE, *LIVE)}
    found.add("hostile_weights")  # by tests/vllm/test_hostile_weights.py
    parts = {
        "bare",
        "controls_rewards",
        "demo_run",
        "engine_fit",
        "setting",
        "smoke",
        "trl_step",
        "where",
    }
    assert {file.stem for file in BENCHMARKS.glob("*.py")} - found == parts
