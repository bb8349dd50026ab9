"""A journalled sample is there once, whichever attempt wrote it; and an older attempt can no longer write."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakes.builders import rollout
from rlhfless.records import FinishReason, Rollout
from rlhfless.records.journal import BegunGroup, Journal, JournalError, StaleAttempt


def same(a: Rollout, b: Rollout) -> bool:
    arrays = np.array_equal(a.token_ids, b.token_ids) and a.logprobs.tobytes() == b.logprobs.tobytes()
    return arrays and replace(a, token_ids=b.token_ids, logprobs=b.logprobs) == b


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_attempt()
    return journal


def test_rollouts_come_back_as_they_were_and_in_the_order_in_which_they_came(journal: Journal, tmp_path: Path) -> None:
    journal.add(3, [rollout("q", 1), rollout("q", 0, tokens=9)])
    journal.add(3, [rollout("p", 0, tokens=0)])
    journal.add(4, [rollout("p", 0)])
    journal.close()
    again = Journal(tmp_path / "journal.sqlite").rollouts(3)
    assert [(r.key, len(r.token_ids)) for r in again] == [(("q", 1), 3), (("q", 0), 9), (("p", 0), 0)]
    assert same(again[0], rollout("q", 1))


def test_the_first_of_a_sample_stays(journal: Journal) -> None:
    journal.add(1, [rollout(tokens=3)])
    journal.add(1, [rollout(tokens=7)])
    assert [len(r.token_ids) for r in journal.rollouts(1)] == [3]


def test_after_a_change_what_no_checkpoint_holds_is_generated_again(journal: Journal) -> None:
    journal.begin_groups(2, ["a", "b"])
    journal.take_groups(2, [(2, "a")])
    journal.begin_groups(3, ["c"])
    journal.take_groups(3, [(2, "b")])
    for step, prompt_id in ((2, "b"), (3, "c"), (4, "p")):
        journal.add(step, [rollout(prompt_id)])
    assert journal.redraw(2) == 2
    assert journal.rollouts(1, 2, 3, 4) == []
    assert journal.groups(3) == [BegunGroup(2, "b", None)]  # begun by a step that is learned, and still to be taken
    assert journal.redraw(2) == 0


def test_a_checkpoint_makes_older_steps_needless(journal: Journal) -> None:
    for step in (1, 2, 3):
        journal.add(step, [rollout()])
    journal.forget(2)
    assert [len(journal.rollouts(step)) for step in (1, 2, 3)] == [0, 0, 1]


def test_an_older_attempt_is_shut_out(journal: Journal, tmp_path: Path) -> None:
    newer = Journal(tmp_path / "journal.sqlite")
    assert newer.begin_attempt() == 2
    with pytest.raises(StaleAttempt, match="attempt 2 of this run has started, so attempt 1"):
        journal.add(1, [rollout()])
    with pytest.raises(StaleAttempt):
        journal.forget(1)
    newer.add(1, [rollout()])
    assert len(journal.rollouts(1)) == 1


def test_what_was_added_outlives_a_kill(tmp_path: Path) -> None:
    """The writer is killed between two additions, with the second transaction open."""
    program = f"""
        import os, signal
        from pathlib import Path
        from fakes.builders import rollout
        from rlhfless.records.journal import Journal
        journal = Journal(Path({str(tmp_path / "journal.sqlite")!r}))
        journal.begin_attempt()
        journal.add(1, [rollout("p", 0), rollout("p", 1)])
        journal._database.execute("BEGIN IMMEDIATE")
        journal._database.execute("DELETE FROM rollouts")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=os.environ, timeout=120)
    assert result.returncode == -signal.SIGKILL
    journal = Journal(tmp_path / "journal.sqlite")
    assert [r.key for r in journal.rollouts(1)] == [("p", 0), ("p", 1)]
    assert journal.begin_attempt() == 2


def test_a_full_disk_is_named_and_takes_nothing_away(journal: Journal) -> None:
    journal.add(1, [rollout()])
    (pages,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(JournalError, match=r"journal\.sqlite could not be read or written: database or disk is full"):
        journal.add(1, [rollout(sample=1, tokens=100_000)])
    assert [r.key for r in journal.rollouts(1)] == [("p", 0)]
    journal._database.execute(f"PRAGMA max_page_count={pages + 1000}")
    journal.add(1, [rollout(sample=1, tokens=100_000)])
    assert len(journal.rollouts(1)) == 2


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("not a database, and long enough to be looked at" * 40)
    with pytest.raises(JournalError, match=r"/a could not be read or written: file is not a database"):
        Journal(tmp_path / "a")
    database = sqlite3.connect(tmp_path / "b")
    database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(JournalError, match="version 99, and this rlhfless knows 5"):
        Journal(tmp_path / "b")


def test_an_aborted_rollout_gives_its_place_to_what_comes_of_it(journal: Journal) -> None:
    aborted = replace(rollout(tokens=3), finish_reason=FinishReason.ABORT)
    journal.add(1, [aborted])
    journal.add(1, [replace(aborted, token_ids=np.arange(5), logprobs=np.zeros(5, np.float32))])
    assert [len(r.token_ids) for r in journal.rollouts(1)] == [5]
    journal.add(1, [rollout(tokens=7)])
    journal.add(1, [aborted])
    assert [(len(r.token_ids), r.finish_reason) for r in journal.rollouts(1)] == [(7, FinishReason.STOP)]


def test_what_a_step_began_for_later_ones_outlives_its_checkpoint(journal: Journal, tmp_path: Path) -> None:
    journal.begin_groups(1, ["q", "p"])
    journal.add(1, [rollout("p"), rollout("q")])
    journal.take_groups(1, [(1, "p")])
    journal.begin_groups(2, ["r"])
    assert journal.groups(1) == [BegunGroup(1, "q", None), BegunGroup(1, "p", 1)]
    assert journal.groups(2) == [BegunGroup(1, "q", None), BegunGroup(2, "r", None)]
    journal.forget(1)
    assert [r.prompt_id for r in journal.rollouts(1)] == ["q"]
    journal.take_groups(2, [(1, "q")])
    journal.forget(2)
    assert journal.rollouts(1) == []
    assert Journal(tmp_path / "journal.sqlite").groups(9) == [BegunGroup(2, "r", None)]
