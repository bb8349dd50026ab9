"""Which checkpoints there are, and which are kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records.checkpoints import (
    CHECKPOINTS_FOLDER,
    NOTES_FILE,
    STATE_FOLDER,
    Checkpoint,
    CheckpointError,
    CheckpointNotes,
    Checkpoints,
    checkpoints_of,
    export_model,
    read_notes,
)
from rlhfless.spec import BestSpec, CheckpointSpec


def notes(step: int, score: float | None = 0.0) -> CheckpointNotes:
    return CheckpointNotes("run", 1, step, "ab", score, {"exact_match": 0.5})


def write(folder: Path, step: int, score: float | None = 0.0) -> None:
    path = Path(Checkpoints(folder, 1).location(step))
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / NOTES_FILE).write_text(json.dumps(notes(step, score).as_json()))


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, score in ((10, 0.2), (20, 0.9), (30, 0.4), (40, 0.3), (50, 0.1)):
        write(tmp_path, step, score)
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    assert [Path(location).name for location in checkpoints.prune()] == ["step-000010", "step-000030"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000040", "step-000050"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.notes == notes(50, 0.1)


def kept(scores: Iterable[tuple[int, float | None]], keep_last: int, mode: Literal["max", "min"] = "max") -> set[int]:
    checkpoints = [Checkpoint("", notes(step, score)) for step, score in scores]
    return Checkpoints("/nowhere", keep_last, BestSpec(mode=mode)).kept(checkpoints)


def test_of_equals_the_later_is_the_best_and_an_unmeasured_one_is_the_worst() -> None:
    assert kept([(1, 0.5), (2, 0.5), (3, None)], 1) == {2, 3}
    assert kept([(1, None), (2, None)], 1) == {2}
    assert kept([], 3) == set()


def test_the_best_may_be_the_smallest() -> None:
    scores = [(1, 0.5), (2, 0.1), (3, 0.1), (4, 0.9), (5, None)]
    assert kept(scores, 1, "min") == {3, 5}
    assert kept(scores, 1, "max") == {4, 5}


@given(
    st.dictionaries(st.integers(1, 99), st.none() | st.floats(-1, 1)),
    st.integers(1, 5),
    st.sampled_from(["max", "min"]),
)
def test_as_many_as_asked_for_and_at_most_one_more(
    scores: dict[int, float | None], keep_last: int, mode: Literal["max", "min"]
) -> None:
    keep = kept(scores.items(), keep_last, mode)
    last = set(sorted(scores)[-keep_last:])
    assert last <= keep <= set(scores)
    assert len(keep - last) <= 1


def test_notes_of_an_older_rlhfless_are_read(tmp_path: Path) -> None:
    write(tmp_path, 1)
    file = tmp_path / "step-000001" / NOTES_FILE
    file.write_text(json.dumps(notes(1).as_json() | {"prompts": {"streaks": {}, "recent": {}}}))
    assert read_notes(file.parent) == notes(1)


def test_half_a_checkpoint_and_one_of_another_version_are_no_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".step-000002.abc.partial").mkdir()
    assert [found.notes.step for found in Checkpoints(tmp_path, 1).all()] == [1]
    file = tmp_path / "step-000001" / NOTES_FILE
    file.write_text(json.dumps({"version": 7}))
    with pytest.raises(CheckpointError, match="has version 7, and this rlhfless knows 2"):
        Checkpoints(tmp_path, 1).newest()
    for content in ("[]", json.dumps({"version": 2, "step": 2}), "[" * 100_000):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=r"step-000001 is not a checkpoint of a run: run\.json"):
            Checkpoints(tmp_path, 1).newest()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"step-000001 is not a checkpoint of a run: run\.json"):
        Checkpoints(tmp_path, 1).newest()


def test_in_an_object_store(tmp_path: Path) -> None:
    """fsspec's own store in memory. A checkpoint whose notes are missing is still being copied, or half deleted."""
    files = MemoryFileSystem()
    where = f"memory://{tmp_path.name}/run"
    checkpoints = Checkpoints(where, keep_last=1)
    assert checkpoints.newest() is None
    for step in (1, 2, 3):
        location = checkpoints.location(step)
        assert location == f"{where}/step-00000{step}"
        files.pipe_file(f"{location}/model/weights", b"weights")
        if step < 3:
            files.pipe_file(f"{location}/{NOTES_FILE}", json.dumps(notes(step).as_json()).encode())
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.notes.step == 2
    assert checkpoints.prune() == [f"memory:///{tmp_path.name}/run/step-000001"]
    assert not files.exists(checkpoints.location(1))
    with checkpoints.token() as token:
        assert files.cat_file(token) == b"rlhfless"
    assert not files.exists(token)


def test_a_url_that_nothing_installed_can_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.url 'nosuch://bucket/run-1'"):
        checkpoints_of(tmp_path / "run-1", CheckpointSpec(url="nosuch://bucket"))
    assert checkpoints_of(tmp_path / "run-1", CheckpointSpec()).location(2) == str(
        tmp_path / "run-1" / "checkpoints" / "step-000002"
    )


def test_a_model_is_exported_without_the_learners_state(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20):
        write(run / CHECKPOINTS_FOLDER, step)
        state = run / CHECKPOINTS_FOLDER / f"step-0000{step}" / STATE_FOLDER
        state.mkdir()
        (state / "__0_0.distcp").write_bytes(b"moments")
    assert export_model(str(run), tmp_path / "newest").step == 20
    assert export_model(f"{run}/{CHECKPOINTS_FOLDER}/step-000010", tmp_path / "first").step == 10
    for name in ("newest", "first"):
        assert [path.name for path in (tmp_path / name).rglob("*")] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="newest already exists"):
        export_model(str(run), tmp_path / "newest")
    with pytest.raises(CheckpointError, match="is not a checkpoint of a run"):
        export_model(str(tmp_path), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "newest", "run"]


def test_a_model_is_exported_from_an_object_store(tmp_path: Path) -> None:
    store = MemoryFileSystem()
    for name, content in ((NOTES_FILE, json.dumps(notes(3).as_json()).encode()), ("config.json", b"{}")):
        store.pipe_file(f"/exported/step-000003/{name}", content)
    assert export_model("memory://exported/step-000003", tmp_path / "model").step == 3
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def write_part(folder: Path, step: int, part: str) -> None:
    path = Path(Checkpoints(folder, 1).location(step, part))
    path.mkdir(parents=True)
    (path / NOTES_FILE).write_text(json.dumps(notes(step).as_json()))


def write_with_critic(folder: Path, step: int) -> None:
    write(folder, step)
    path = Path(Checkpoints(folder, 1).location(step)) / NOTES_FILE
    path.write_text(json.dumps(dataclasses.replace(notes(step), parts=("critic",)).as_json()))


def test_a_checkpoint_without_one_of_its_parts_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    assert Path(checkpoints.location(10, "critic")) == tmp_path / "critic" / "step-000010"
    for step in (10, 20):
        write_with_critic(tmp_path, step)
    write_part(tmp_path, 10, "critic")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.notes.step == 10, "the learner had written that of step 20, and the critic had not"
    assert newest.notes.parts == ("critic",)
    write_part(tmp_path, 20, "critic")
    assert [each.notes.step for each in checkpoints.all()] == [10, 20]


def test_parts_go_with_their_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_with_critic(tmp_path, step)
        write_part(tmp_path, step, "critic")
    write_part(tmp_path, 5, "critic")  # the learner was lost before it had written its own
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    assert [Path(location).name for location in checkpoints.prune()] == ["step-000010", "step-000020"]
    assert sorted(path.name for path in (tmp_path / "critic").iterdir()) == ["step-000030"]
    assert [each.notes.step for each in checkpoints.all()] == [30]
