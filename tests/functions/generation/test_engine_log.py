"""The file of an engine's log: in the run's folder where that is, else in the user's own on the actor's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfless.functions.generation.engine_log import errors_and_end, log_file

TRACE = "".join(f"  File 'core.py', line {number}\n" for number in range(50))
FAILED = f"""(Worker pid=3) INFO 11-25 01:48:50 [parallel_state.py:1] rank 0
(Worker pid=3) ERROR 11-25 01:48:51 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 11-25 01:48:51 [multiproc_executor.py:953]   File "worker.py", line 1
(Worker pid=3) ERROR 11-25 01:48:51 [multiproc_executor.py:953] torch.OutOfMemoryError: CUDA out of memory
(EngineCore pid=2) ERROR 11-25 01:48:54 [core.py:1510] RuntimeError: WorkerProc initialization failed
Process EngineCore:
{TRACE}RuntimeError: WorkerProc initialization failed
RuntimeError: Engine core initialization failed
"""
"""As vLLM 0.32 writes it: the worker has the cause, the core fails because of it, and its process says so once more."""


def test_in_the_runs_folder(tmp_path: Path) -> None:
    file = log_file(str(tmp_path), "demo-1", "demo-1-generation-3")
    assert file == tmp_path / "engines" / "generation-3.log"
    assert file.parent.is_dir()


def test_on_a_machine_without_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFLESS_HOME", str(tmp_path / "home"))
    file = log_file(str(tmp_path / "elsewhere" / "demo-1"), "demo-1", "demo-1-generation-3")
    assert file == tmp_path / "home" / "logs" / "demo-1" / "generation-3.log"
    assert file.parent.is_dir()
    assert not (tmp_path / "elsewhere").exists()


def test_the_first_error_is_told_first_and_the_last_lines_after_it(tmp_path: Path) -> None:
    log = tmp_path / "generation-0.log"
    log.write_text(FAILED)
    told = errors_and_end(log, "RuntimeError: Engine core initialization failed")
    lines = told.splitlines()
    assert lines[:3] == [
        f"errors in the engine's log, {log}:",
        "    torch.OutOfMemoryError: CUDA out of memory",
        "    RuntimeError: WorkerProc initialization failed",
    ]
    assert lines[3] == f"the engine's log, {log}, ends with:"
    assert lines[-1] == "    RuntimeError: WorkerProc initialization failed"
    assert len(lines) == 16
    assert "Engine core" not in told


def test_a_log_without_errors_and_none_at_all(tmp_path: Path) -> None:
    log = tmp_path / "generation-0.log"
    assert errors_and_end(log, "it ended") == ""
    log.write_text("Fatal: killed\n")
    assert errors_and_end(log, "it ended") == f"the engine's log, {log}, ends with:\n    Fatal: killed"
