"""Changes that a resumed run must report: its inputs and its learning rates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from fakes.builders import rollout
from rlhfless.orchestrator.resuming import INPUTS_FILE, NOT_RECORDED, hold_inputs, schedule_problems
from rlhfless.prepare import inputs
from rlhfless.records.checkpoints import NOTES_FILE, CheckpointNotes, Checkpoints
from rlhfless.records.journal import Journal
from rlhfless.records.ledger import JOURNAL_FILE
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError

ROWS = [{"prompt": f"w{i}", "answer": i} for i in range(6)]

REWARD = "from own_helpers import right\ndef score(*, response, **_):\n    return right(response)\n"
HELPERS = "def right(text):\n    return float(text == 'yes')\n"


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a model, data and user code."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 8}')
    (model / "tokenizer.json").write_text("{}")
    (model / "README.md").write_text("a model")
    save_file({"weight": np.zeros(1000, np.float32)}, model / "model.safetensors")
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / "test.jsonl", ROWS[:2])
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "more.parquet")
    (tmp_path / "own_reward.py").write_text(REWARD)
    (tmp_path / "own_helpers.py").write_text(HELPERS)
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_reward", "own_helpers"):
        sys.modules.pop(name, None)
    return tmp_path


def spec_of(place: Path, **changes: Any) -> RunSpec:
    values = {
        "model": {"path": str(place / "model")},
        "prompts": {"path": str(place / "train.jsonl"), "held_out": {"path": str(place / "test.jsonl")}},
        "rewards": [{"type": "python", "target": "own_reward:score"}],
        "evaluation": {"sets": [{"name": "more", "path": str(place / "more.parquet")}]},
        "steps": 20,
    }
    return RunSpec.model_validate(values | changes)


def begin(folder: Path, step: int = 3) -> None:
    """Leave the folder as a run does that has saved a step."""
    path = Path(Checkpoints(folder / "checkpoints", 1).location(step))
    path.mkdir(parents=True)
    (path / NOTES_FILE).write_text(json.dumps(CheckpointNotes("run-1", 1, step, "ab", None, {}).as_json()))


@pytest.fixture
def run_folder(place: Path) -> Path:
    """Return the folder of a run that has started with these inputs."""
    folder = place / "runs" / "run-1"
    folder.mkdir(parents=True)
    assert hold_inputs(spec_of(place), folder) == []
    begin(folder)
    return folder


def refusal(place: Path, folder: Path, allowed: tuple[str, ...] = ()) -> str:
    with pytest.raises(InputError) as caught:
        hold_inputs(spec_of(place), folder, allowed)
    return str(caught.value)


def test_a_crash_recovery_without_a_change_is_silent(place: Path, run_folder: Path) -> None:
    for _ in range(3):
        assert hold_inputs(spec_of(place), run_folder) == []
    (place / "train.jsonl").touch()
    (place / "model" / "README.md").write_text("another text")
    (place / "unrelated.py").write_text("x = 2\n")
    (place / "unrelated.jsonl").write_text("{}")
    content = (place / "train.jsonl").read_bytes()
    (place / "train.jsonl").write_bytes(content.replace(b"\n", b"\r\n") + b"\n\n")
    pq.write_table(pa.Table.from_pylist(ROWS), place / "more.parquet", compression="gzip")
    assert hold_inputs(spec_of(place), run_folder) == []


def edit_row(place: Path) -> None:
    write_rows(place / "train.jsonl", [*ROWS[:2], ROWS[2] | {"answer": 99}, *ROWS[3:]])


def add_row(place: Path) -> None:
    write_rows(place / "train.jsonl", [*ROWS, {"prompt": "w9", "answer": 9}])


def move_row(place: Path) -> None:
    write_rows(place / "train.jsonl", [*ROWS[1:], {"prompt": "w9", "answer": 9}])


def other_order(place: Path) -> None:
    write_rows(place / "train.jsonl", ROWS[::-1])


def held_out(place: Path) -> None:
    write_rows(place / "test.jsonl", ROWS[:1])


def parquet(place: Path) -> None:
    pq.write_table(pa.Table.from_pylist([*ROWS[:5], {"prompt": "w5", "answer": 7}]), place / "more.parquet")


def config(place: Path) -> None:
    (place / "model" / "config.json").write_text('{"hidden_size": 16}')


def tokenizer(place: Path) -> None:
    (place / "model" / "tokenizer.json").unlink()


def template(place: Path) -> None:
    (place / "model" / "chat_template.jinja").write_text("{{ messages }}")


def weights(place: Path) -> None:
    weight = np.zeros(1000, np.float32)
    weight[700] = 1e-3
    save_file({"weight": weight}, place / "model" / "model.safetensors")


def reward(place: Path) -> None:
    (place / "own_reward.py").write_text(REWARD.replace("right(response)", "1 - right(response)"))


def helper(place: Path) -> None:
    (place / "own_helpers.py").write_text(HELPERS.replace("yes", "no"))


@pytest.mark.parametrize(
    ("edit", "kind", "told"),
    [
        (edit_row, "data", ["prompts.path", "of 6 rows 1 changed, 0 removed, 0 added; the first is row 3"]),
        (add_row, "data", ["of 6 rows 0 changed, 0 removed, 1 added; the first is row 7"]),
        (move_row, "data", ["of 6 rows 0 changed, 1 removed, 1 added; the first is row 1"]),
        (other_order, "data", ["the same 6 rows in another order"]),
        (held_out, "data", ["prompts.held_out.path", "of 2 rows 0 changed, 1 removed, 0 added"]),
        (parquet, "data", ["evaluation.sets.0.path", "more.parquet had ", "of 6 rows 1 changed"]),
        (config, "model", ["model.path", "config.json had "]),
        (tokenizer, "model", ["tokenizer.json is gone"]),
        (template, "model", ["chat_template.jinja is new"]),
        (weights, "model", ["model.safetensors had "]),
        (reward, "code", ["rewards.0.target: 'own_reward:score' is not what the run started with: own_reward.py had "]),
        (helper, "code", ["rewards.0.target", "own_helpers.py had "]),
    ],
)
def test_a_change_is_named_and_refused_until_it_is_allowed(
    place: Path, run_folder: Path, edit: Callable[[Path], None], kind: str, told: list[str]
) -> None:
    record = (run_folder / INPUTS_FILE).read_text()
    edit(place)
    message = refusal(place, run_folder)
    for text in ("1 problem\n", *told, f"--allow-changed {kind}", f'{{"allow_changed": ["{kind}"]}}'):
        assert text in message
    others = tuple({"data", "model", "code"} - {kind})
    assert refusal(place, run_folder, others) == message
    assert (run_folder / INPUTS_FILE).read_text() == record
    (warning,) = hold_inputs(spec_of(place), run_folder, (kind,))
    assert warning.endswith("; the change was allowed; the run resumes with it")
    assert hold_inputs(spec_of(place), run_folder) == []  # recovery from a later crash reports nothing


@pytest.mark.parametrize("saved", [0, 3])
@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("none", False),
        ("data", True),
        ("code", True),
        ("rates", True),  # such a resumed run failed its weight check in step 4, and could never resume
        ("steps", False),
    ],
)
def test_after_a_change_samples_that_no_checkpoint_holds_are_generated_again(
    place: Path, change: str, again: bool, saved: int
) -> None:
    folder = place / "runs" / "run-3"
    folder.mkdir(parents=True)
    optimizer = {"rate_schedule": "constant" if change == "steps" else "linear"}
    before = spec_of(place, optimizer=optimizer)
    assert hold_inputs(before, folder) == []
    if saved:
        begin(folder, saved)
    with closing(Journal(folder / JOURNAL_FILE)) as journal:
        journal.begin_attempt()
        for step in (4, 5):
            journal.add(step, [rollout()])
    {"data": edit_row, "code": reward}.get(change, lambda _: None)(place)
    now = spec_of(place, optimizer=optimizer, steps=40 if change in ("rates", "steps") else 20)
    warnings = hold_inputs(now, folder, ("data", "code"), before)
    told = "after step 3, the newest checkpoint" if saved else "from step 1, because no checkpoint was saved yet"
    expected = [f"the run resumes {told}: with the change, 2 later step(s) are generated and learned again"] * again
    assert [each.partition(";")[0] for each in warnings if "allowed" not in each] == expected
    with closing(Journal(folder / JOURNAL_FILE)) as journal:
        assert bool(journal.rollouts(4, 5)) is not again


def test_all_changes_are_named_at_once(place: Path, run_folder: Path) -> None:
    for edit in (edit_row, held_out, config, helper):
        edit(place)
    message = refusal(place, run_folder, ("data",))
    assert "2 problems" in message
    assert "prompts.path" not in message


def test_a_run_that_has_drawn_nothing_yet_may_read_other_files(place: Path) -> None:
    folder = place / "runs" / "run-2"
    folder.mkdir(parents=True)
    assert hold_inputs(spec_of(place), folder) == []
    edit_row(place)
    assert hold_inputs(spec_of(place), folder) == []
    begin(folder)
    assert hold_inputs(spec_of(place), folder) == []


@pytest.mark.parametrize("record", [None, "", "not json", '{"version": 9}', '[{"other": 1}]'])
def test_a_run_without_a_record_says_so_once(place: Path, run_folder: Path, record: str | None) -> None:
    if record is None:
        (run_folder / INPUTS_FILE).unlink()
    else:
        (run_folder / INPUTS_FILE).write_text(record)
    edit_row(place)
    assert hold_inputs(spec_of(place), run_folder) == [NOT_RECORDED]
    assert hold_inputs(spec_of(place), run_folder) == []


def test_a_set_that_the_spec_adds_is_no_change_of_the_inputs(place: Path, run_folder: Path) -> None:
    sets = [{"name": "more", "path": str(place / "more.parquet")}, {"name": "test", "path": str(place / "test.jsonl")}]
    assert hold_inputs(spec_of(place, evaluation={"sets": sets}), run_folder) == []


def test_large_weight_files_are_sampled(place: Path, monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> None:
    monkeypatch.setattr(inputs, "FULL_BYTES", 1000)
    monkeypatch.setattr(inputs, "SAMPLE_BYTES", 128)
    file = place / "model" / "model.safetensors"
    before = inputs._digest(file, sampled=True)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert inputs._digest(file, sampled=True) != before
    file.write_bytes(content + b"\0")
    assert inputs._digest(file, sampled=True) != before


def test_differences_of_many_rows_are_counted_without_aligning_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_ALIGNED", 3)
    old, new = [b"a", b"b", b"c", b"d", b"e"], [b"x", b"b", b"c", b"d", b"y", b"z"]
    assert inputs._told_rows(old, new) == "of 5 rows 2 changed, 0 removed, 1 added; the first is row 1"


def scheduled(steps: int, optimizer: Mapping[str, Any], **changes: Any) -> RunSpec:
    values = {
        "model": {"path": "m"},
        "prompts": {"path": "p"},
        "rewards": [{"type": "exact_match"}],
        "steps": steps,
        "optimizer": {"learning_rate": 1e-5} | dict(optimizer),
    }
    return RunSpec.model_validate(values | changes)


@pytest.mark.parametrize(
    ("optimizer", "steps", "done", "told"),
    [
        # Updates 10 and 11 of 20 have 1e-5 (1 - 9 / 20) and 1e-5 (1 - 10 / 20).
        # Update 11 of 40 has 1e-5 (1 - 10 / 40).
        (
            {"rate_schedule": "linear"},
            40,
            10,
            "a rate of 5.5e-06, and step 11 would continue with 7.5e-06 instead of 5e-06",
        ),
        ({"rate_schedule": "linear"}, 11, 10, "continue with 9.09e-07 instead of 5e-06"),
        ({"rate_schedule": "cosine"}, 40, 20, "step 21 would continue with 5e-06 instead of 0"),
        (
            {"rate_schedule": "linear", "rate_floor": 0.5},
            40,
            20,
            "21 would continue with 7.5e-06 instead of 5e-06",
        ),
        (
            {"rate_schedule": "linear", "warmup_steps": 5},
            40,
            3,
            "6e-06, and step 4 would continue with 8e-06",
        ),
        ({"rate_schedule": "constant"}, 40, 10, None),
        ({"rate_schedule": "linear"}, 20, 10, None),
        ({"rate_schedule": "linear"}, 40, 0, None),
    ],
)
def test_other_rates_are_named(optimizer: Mapping[str, Any], steps: int, done: int, told: str | None) -> None:
    problems = schedule_problems(scheduled(20, optimizer), scheduled(steps, optimizer), done)
    if told is None:
        assert problems == []
        return
    (problem,) = problems
    assert problem.where == "steps"
    assert told in problem.what
    assert "--allow-changed schedule" in problem.hint


def test_each_optimiser_is_named() -> None:
    critic = {"warm_up_steps": 2, "optimizer": {"learning_rate": 2e-5, "rate_schedule": "linear"}}
    changes = {"algorithm": {"type": "ppo"}, "critic": critic, "mini_batches": 2}
    optimizer = {"rate_schedule": "linear"}
    found = schedule_problems(scheduled(12, optimizer, **changes), scheduled(22, optimizer, **changes), 7)
    assert ["optimizer.rate_schedule" in each.what for each in found] == [True, True]
    # The policy has done (7 - 2) * 2 of (12 - 2) * 2 updates, and the critic 14 of 24.
    assert "step 8 would continue with 7.5e-06 instead of 5e-06" in found[0].what
    assert f"instead of {2e-5 * (1 - 14 / 24):.3g}" in found[1].what
