"""Where the routes of tokens are: spans follow their tokens, and files live as long as what names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.builders import drawn, rollout
from rlhfless.algorithms.batch import pack, select
from rlhfless.functions.route_files import RouteFiles
from rlhfless.records import Episode, EpisodeStatus, EpisodeTurn, Group, Prompt, RouteSpan, routes_within
from rlhfless.records.journal import Journal
from rlhfless.records.routes import FOLDER, as_rows, name_of, stored, write_routes


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 9))
def test_a_part_of_a_span_names_the_same_rows(start: int, length: int, begin: int, size: int, row: int) -> None:
    span = RouteSpan("f", start, start + length, row)
    kept = {token: row + token - start for token in range(start, start + length) if begin <= token < begin + size}
    found = {}
    for part in routes_within([span], begin, begin + size, moved=5):
        found |= {token: part.row + token - part.start for token in range(part.start, part.end)}
    assert found == {token + 5: number for token, number in kept.items()}


@pytest.mark.parametrize(("experts", "dtype"), [(2, np.uint8), (255, np.uint8), (256, np.uint16), (512, np.uint16)])
def test_rows_are_stored_in_the_smallest_format(experts: int, dtype: type) -> None:
    rows = np.array([[[0, experts - 1]], [[-1, -1]]], dtype=np.int16)
    assert stored(rows, experts).dtype == dtype
    np.testing.assert_array_equal(as_rows(stored(rows, experts)), rows)


def test_the_journal_keeps_the_names_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_attempt()
    spans = (RouteSpan(name_of(1), 0, 2), RouteSpan(name_of(1), 2, 3, 7))
    journal.add(1, [replace(rollout("p", 0), routes=spans), rollout("q", 0)])
    assert [row.routes for row in journal.rollouts(1)] == [spans, ()]
    journal.close()


def test_routes_end_with_the_steps_that_a_checkpoint_covers(tmp_path: Path) -> None:
    """Those of a group that a later step learns from stay."""
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_attempt()
    names = {(step, prompt): name_of(step) for step in (1, 2, 3) for prompt in "ab"}
    for (step, prompt), name in names.items():
        write_routes(tmp_path / FOLDER / name, np.zeros((1, 1, 1), np.uint8))
        journal.add(step, [replace(rollout(prompt, 0), routes=(RouteSpan(name, 0, 1),))])
    journal.begin_groups(2, ["a", "b"])
    journal.take_groups(2, [(2, "a")])
    journal.forget(2)
    left = {str(file.relative_to(tmp_path / FOLDER)) for file in (tmp_path / FOLDER).glob("*/*")}
    assert left == {names[2, "b"], names[3, "a"], names[3, "b"]}
    journal.close()


def test_a_batch_names_the_row_of_each_generated_token(tmp_path: Path) -> None:
    """Two samples, one of them an episode of two turns with an answer between them, and a moved one."""
    prompt = Prompt("p", (1, 2), "")
    moved = replace(
        drawn("p", 0, [5, 6, 7, 8]),
        episode=_episode(_turn(0, 4)),
        routes=(RouteSpan("step-000001/a.npy", 0, 2), RouteSpan("step-000001/b.npy", 2, 3)),
    )
    played = replace(
        drawn("p", 1, [5, 6, 40, 41, 7, 8, 9]),
        episode=_episode(_turn(0, 2), _turn(4, 7)),
        routes=(RouteSpan("step-000001/c.npy", 0, 1), RouteSpan("step-000001/d.npy", 4, 6)),
    )
    batch = pack([Group.of(prompt, [moved, played])])
    assert batch.route_files == tuple(f"step-000001/{name}.npy" for name in "abcd")
    assert batch.route_file is not None
    assert batch.route_row is not None
    assert batch.route_file.tolist() == [0, 0, 1, 1, 2, 0, 0, 0, 3, 0, 0, 0, 4, 4, 0]
    assert batch.route_row.tolist() == [0, 0, 1, 2, 1, 0, 0, 0, 1, 0, 0, 0, 1, 2, 0]
    second = select(batch, np.array([1]))
    assert second.route_file is not None
    assert second.route_file.tolist() == [0, 0, 3, 0, 0, 0, 4, 4, 0]
    assert second.route_files == batch.route_files
    assert pack([Group.of(prompt, [drawn("p", 0, [5])])]).route_file is None


def _episode(*turns: EpisodeTurn) -> Episode:
    return Episode((1, 2), turns, (), EpisodeStatus.DONE, None, "", "")


def _turn(start: int, end: int) -> EpisodeTurn:
    return EpisodeTurn(
        start=start, end=end, seed=0, text="", parsed="text", finish_reason="stop", started_s=0.0, ended_s=1.0
    )


def test_rows_are_read_by_file_and_number(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    write_routes(tmp_path / "a.npy", stored(rows, 64))
    write_routes(tmp_path / "b.npy", stored(rows + 30, 64))
    write_routes(tmp_path / "other.npy", stored(rows.reshape(4, 2, 3), 64))
    source = RouteFiles(tmp_path, 3, 2)
    files = ["b.npy", "a.npy", "gone.npy", "other.npy"]
    found = source.rows(files, np.array([1, 0, 1, 2, 3, 0]), np.array([3, 0, 0, 0, 0, 9]))
    np.testing.assert_array_equal(found[:3], [rows[3], rows[0] + 30, rows[0]])
    assert (found[3:] == -1).all(), "a file that is gone, one of another model, and a row that is not there"
