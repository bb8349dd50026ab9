"""The service with real runs: paused, resumed, its drivers and itself killed; several runs share two cores."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fakes.live_runs import FAULT_STEPS, Whole, fault_values
from fakes.service_up import COMMAND, Up, engine_of, kill_at_work, posted, rank_of
from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.control.lifecycle import Status
from rlhfless.records import Work
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.records.traces import compare_samples, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def up(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    service = Up(tmp_path_factory.mktemp("service") / "data", (assets,))
    service.start()
    yield service
    subprocess.run([COMMAND, "down", "--data", str(service.data)], check=True, timeout=200)
    assert not [path for path in (service.data, *service.data.rglob("*")) if path.stat().st_mode & 0o077]
    assert not (service.data / "ray").exists()
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(service.data) in str(p.info["cmdline"])]
    assert left == []


def test_a_run_survives_its_drivers_and_the_service(up: Up, assets: Path, whole: Whole) -> None:
    """Three kills: a driver at work, its successor while it starts, and the service with it."""
    with up.client as client:
        run = client.create_run(posted(fault_values(assets, actors=1)))
        up.until(run.id, lambda now: now.step >= 2)
        client.pause_run(run.id)
        paused = up.until(run.id, lambda now: now.status is Status.PAUSED)
        assert paused.latest_checkpoint is not None
        assert paused.latest_checkpoint.step == paused.step
        client.resume_run(run.id)
    up.until(run.id, lambda now: now.step > paused.step)
    up.kill_driver(run.id)
    up.until(run.id, lambda now: now.attempt == 3)
    up.kill_driver(run.id)
    up.kill()
    up.start()
    ended = up.until(run.id, lambda now: now.status in (Status.SUCCEEDED, Status.CANCELLED))
    assert (ended.status, ended.step) == (Status.SUCCEEDED, FAULT_STEPS)

    with up.client as client:
        events = list(client.watch(run.id))
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        steps = [event.data["step"] for event in events if event.type == "metrics"]
        assert steps == list(range(1, FAULT_STEPS + 1)), "each step is told once"
        usage = client.usage(run.id)
        assert usage.cost_usd == pytest.approx(sum(row.cost_usd for row in usage.functions))
        assert {row.function for row in usage.functions} >= {"generation", "learner", "scoring"}
        assert client.rollouts(run.id, limit=1).data[0].prompt

    folder = up.data / "runs" / run.id
    trace = read_trace(folder / "trace")
    same = compare_samples(trace, whole.trace)
    assert (same.compared, same.fraction, same.only_in_first) == (len(trace.rollouts), 1.0, 0)
    newest = Checkpoints(folder / "checkpoints", 2).newest()
    assert newest is not None
    assert newest.notes.digest == whole.digest


@pytest.mark.seldom
@pytest.mark.long
def test_runs_that_learn_from_pairs_end_with_the_figures_and_the_bill_of_their_type(up: Up, assets: Path) -> None:
    """A DPO run and a reward model's, side by side: no generation is held, drawn or shown."""
    problems = draw_problems(TaskRecipe(), np.random.default_rng(0), 64, held_out=False)
    rows = ({"prompt": p.prompt, "chosen": p.answer, "rejected": f"sure {p.answer}"} for p in problems)
    (assets / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    functions = {"dpo": {"learner", "reference"}, "reward_model": {"learner"}}
    with up.client as client:
        runs = {name: client.create_run(pair_values(assets, name)).id for name in functions}
        for name, run_id in runs.items():
            ended = up.until(run_id, lambda now: now.status is Status.SUCCEEDED)
            assert ended.latest["preference_accuracy"] >= 0.8
            best = ended.best_checkpoint
            assert best is not None
            assert best.score == pytest.approx(ended.latest["eval/loss"])
            assert {row.function for row in client.usage(run_id).functions} == functions[name]
            told = [event.data["step"] for event in client.watch(run_id) if event.type == "evaluation"]
            assert told == [0, 3, 6]
            assert client.rollouts(run_id).data == []


def pair_values(assets: Path, run_type: str) -> dict[str, Any]:
    return {
        "type": run_type,
        "name": run_type.replace("_", "-"),
        "model": {"path": str(assets / "model")},
        "preferences": {"path": str(assets / "pairs.jsonl"), "held_out": {"fraction": 0.25}},
        "steps": 6,
        "prompts_per_step": 16,
        "mini_batches": 2,
        "optimizer": {"learning_rate": 3e-3},
        "learner": {"threads": 1},
        "evaluation": {"every_steps": 3},
        "checkpoint": {"every_steps": 3},
        "placement": {"devices": 1},
        "timeouts": {"drain_s": 3},
    }


@pytest.mark.long
def test_runs_on_the_same_devices_do_not_feel_each_other(up: Up, assets: Path, whole: Whole) -> None:
    """Three runs take turns on two devices. One loses its driver, then at work its engine and its learner's rank, as if
    the kernel had ended them for memory; the loss of another is not finite, and it is cancelled. The others' samples
    and weights are those of a run alone."""
    placement = {"mode": "disaggregated", "devices": 2, "learner_devices": 1, "tenants": 3}
    values = posted(fault_values(assets, actors=1)) | {"placement": placement}
    with up.client as client:
        calm, struck = (client.create_run(values | {"name": name}).id for name in ("calm", "struck"))
        infinite = client.create_run(values | {"name": "infinite", "algorithm": {"entropy_bonus": 1e300}}).id
        up.until(struck, lambda now: now.step >= 1)
        up.kill_driver(struck)
        learned = up.until(infinite, lambda now: now.step >= 2)
        assert (learned.latest["skipped_updates"], "loss" in learned.latest) == (2.0, False), "both of a step"
        client.cancel_run(infinite)
        up.until(struck, lambda now: now.attempt == 2 and now.step >= 2)
        rank = rank_of(struck)  # found now, because the steps that are left may end before it is
        kill_at_work(engine_of(struck))
        up.until(struck, lambda now: now.step >= 3)
        kill_at_work(rank)
        up.until(infinite, lambda now: now.status is Status.CANCELLED)
    assert "step 1: 2 update(s) skipped" in (up.data / "runs" / infinite / "run.log").read_text()
    for run_id in (calm, struck):
        up.until(run_id, lambda now: now.status is Status.SUCCEEDED)
        folder = up.data / "runs" / run_id
        same = compare_samples(read_trace(folder / "trace"), whole.trace)
        assert (same.fraction, same.only_in_first) == (1.0, 0)
        newest = Checkpoints(folder / "checkpoints", 2).newest()
        assert newest is not None
        assert newest.notes.digest == whole.digest
    worked = [span for run_id in (calm, struck) for span in spans_by_core(up.data / "runs" / run_id)]
    for core in {core for core, _, _ in worked}:
        of_core = sorted((start_s, end_s) for each, start_s, end_s in worked if each == core)
        assert len(of_core) > FAULT_STEPS
        assert all(after[0] >= before[1] - 0.01 for before, after in itertools.pairwise(of_core)), "one at a time"
    with up.client as client:
        assert client.functions().data == []


def spans_by_core(folder: Path) -> list[tuple[str, float, float]]:
    """When a run drew and learned, and on which core."""
    cores = dict(re.findall(r"(generation|learner)-0: cpu-core (\d+) of", (folder / "run.log").read_text()))
    works = {Work.GENERATE: cores["generation"], Work.LEARN: cores["learner"]}
    calls = read_trace(folder / "trace").invocations
    return [(works[call.work], call.start_s, call.end_s) for call in calls if call.work in works]
