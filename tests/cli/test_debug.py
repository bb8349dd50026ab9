"""`rlhfless debug`: stacks of processes that hang, logs, versions, and no secrets."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhfless.cli.main import app
from rlhfless.util.stacks import stacks_of

HANGS = """
import time

def waits_for_ever(rlhfless):
    print("up", flush=True)
    time.sleep(600)

waits_for_ever(1)
"""


@pytest.fixture
def hanging() -> Iterator[int]:
    """A process of ours that hangs."""
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process.pid
    process.kill()
    process.communicate()


def test_the_archive_says_where_a_process_hangs_and_has_no_secrets(hanging: int, tmp_path: Path) -> None:
    run = tmp_path / "demo-1"
    run.mkdir()
    (run / "run.log").write_text("step 1\nGET https://user:geheim@host/x\n")
    (run / "spec.yaml").write_text("name: demo\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    out = tmp_path / "debug.tar.gz"
    result = CliRunner().invoke(app, ["debug", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    with tarfile.open(out) as archive:
        texts = {entry.name.partition("/")[2]: archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]
    assert "waits_for_ever" in texts[f"stacks/{hanging}.txt"]
    assert texts["run.log"] == "step 1\nGET https://***@host/x\n"
    assert texts["metrics.jsonl"] == '{"step": 1}\n'
    assert json.loads(texts["versions.json"])["packages"]["torch"].startswith("2.")
    assert texts["trace/missing.txt"]
    assert out.stat().st_mode & 0o077 == 0
    again = CliRunner().invoke(app, ["debug", str(run), "--out", str(out)])
    assert again.exit_code != 0, "an archive is not overwritten"


def test_a_process_that_is_gone_is_named() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert f"process {process.pid}: py-spy cannot read it" in stacks_of(process.pid)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["debug", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "is not a folder" in result.stderr
