"""How checks become outcomes, and what the checks of a node say when something is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfless.functions.generation.vllm.arguments import engine_arguments
from rlhfless.selftest import machine
from rlhfless.selftest.check import Check, NotHere, Subject, Wrong, check, opened, outcomes
from rlhfless.selftest.engines import settings_of
from rlhfless.selftest.report import CHECKS


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with opened(None) as found:
        yield found


def test_every_outcome_has_its_reason(subject: Subject) -> None:
    @check("fine", "-")
    def fine(_: Subject) -> dict[str, float]:
        """It measures."""
        return {"seconds": 2.0}

    @check("wrong", "correct it")
    def wrong(_: Subject) -> dict[str, float]:
        raise Wrong("too slow", rate=0.5)

    @check("broken", "look")
    def broken(_: Subject) -> dict[str, float]:
        raise ZeroDivisionError("of zero")

    @check("elsewhere", "-")
    def elsewhere(_: Subject) -> dict[str, float]:
        raise NotHere("no attention for it")

    later = check("later", "-", needs=("fine", "wrong"))(fine.run)
    on_gpus = check("on gpus", "-", gpus=2)(fine.run)
    found = {one.name: one for one in outcomes(subject, (fine, wrong, broken, elsewhere, later, on_gpus))}
    assert {name: one.state for name, one in found.items()} == {
        "fine": "ok",
        "wrong": "failed",
        "broken": "failed",
        "elsewhere": "not applicable",
        "later": "not applicable",
        "on gpus": "not applicable",
    }
    assert (found["fine"].measures, found["fine"].measured) == ("It measures.", {"seconds": 2.0})
    assert (found["wrong"].why, found["wrong"].measured, found["wrong"].remedy) == (
        "too slow",
        {"rate": 0.5},
        "correct it",
    )
    assert "ZeroDivisionError: of zero" in found["broken"].why
    assert "in broken" in found["broken"].measured["trace"]
    assert "wrong" in found["later"].why
    assert "fine" not in found["later"].why
    assert "2 GPU(s)" in found["on gpus"].why


def test_what_a_check_needs_comes_before_it() -> None:
    before: set[str] = set()
    for one in CHECKS:
        assert set(one.needs) <= before, one.name
        assert one.run.__doc__, one.name
        before.add(one.name)


def outcome_of(one: Check, subject: Subject) -> tuple[str, str]:
    (found,) = outcomes(subject, (one,))
    return found.state, found.why


def test_a_small_shared_memory_is_told_with_both_figures(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of(machine.room, subject)[0] == "ok"
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=2**20))
    state, why = outcome_of(machine.room, subject)
    assert state == "failed"
    assert "has 1 MiB free, and up to 3 versions of the weights of 1.85 MiB each" in why
    assert "--shm-size" in why


def test_a_cache_that_cannot_be_written_is_named(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    state, why = outcome_of(machine.caches, subject)
    assert state == "failed"
    assert "TRITON_CACHE_DIR" in why


def test_no_compiler(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert outcome_of(machine.compiler, subject) == ("failed", "no C compiler is on the path")


def test_nothing_is_left_in_shared_memory() -> None:
    with opened(None) as found:
        folder = found.folder
        assert folder.is_dir()
    assert not folder.exists()


def test_a_node_without_nvidias_tools_is_judged_by_torch(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images on GKE have the driver's libraries and not always nvidia-smi on their path."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(machine, "require_cuda", lambda: None)
    assert machine.driver.run(subject) == {"nvidia_smi": []}


def test_the_engine_under_test_can_sleep(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM frees the weights in its sleep only if it was started in sleep mode, whatever placement.turns says."""
    assert not subject.spec.placement.in_turns
    monkeypatch.setattr(Subject, "gpus", 1)
    assert engine_arguments(settings_of(subject))["enable_sleep_mode"] is True
