"""No process that starts vLLM has numba in it: vLLM's registry of CPU kernels fails at llvmlite's objects."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.engine_settings import SETTINGS
from fakes.repository import ROOT
from rlhfless.functions.generation.engine import EngineDead
from rlhfless.functions.generation.vllm.adapter import VllmEngine

BARE = ROOT / "benchmarks" / "bare.py"

INSIDE = (
    "core", "drafter", "experts", "generators", "kv_files", "quantised_layers", "read_back", "scheduler", "sleeping",
    "verification", "weight_engine",
)  # fmt: skip
"""Modules of functions/generation/vllm that are imported beside vLLM; an engine that starts refuses numba itself."""

ABSENT = "import sys; found = {'numba', 'llvmlite'} & sys.modules.keys(); assert not found, found"

STARTERS = {
    "the engine's process": "import rlhfless.functions.generation.vllm.loop",
    "a Serve replica": "import rlhfless.functions.generation.deployment",
    "a bare engine of the benchmarks": f"import sys; sys.path.insert(0, {str(BARE.parent)!r}); import bare",
    # multiprocessing imports the main module under this name in each process that it spawns.
    "a worker of a bare engine": f"import runpy; runpy.run_path({str(BARE)!r}, run_name='__mp_main__')",
}


@pytest.mark.parametrize("imports", STARTERS.values(), ids=STARTERS)
def test_what_starts_vllm_has_not_imported_numba(imports: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{imports}; {ABSENT}"], capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_list_is_complete() -> None:
    """A new file that imports vLLM belongs to a process above, or needs a line of its own there."""
    found = {
        str(file.relative_to(ROOT))
        for room in ("rlhfless", "functions", "sim", "benchmarks", "scripts")
        for file in (ROOT / room).rglob("*.py")
        if "vllm" in imported(file)
    }
    assert found == {f"functions/generation/vllm/{module}.py" for module in INSIDE} | {
        "benchmarks/bare.py",
    }


def imported(file: Path) -> set[str]:
    """Top-level names of the modules that a file imports."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {module.split(".")[0] for module in modules}


@pytest.fixture
def numba_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose sitecustomize module imports numba into every Python process that has it on its path."""
    (tmp_path / "sitecustomize.py").write_text("import numba\n")
    monkeypatch.syspath_prepend(tmp_path)  # the adapter hands its own path on
    return tmp_path


@pytest.mark.long
async def test_an_engine_beside_numba_is_refused_with_the_reason(numba_first: Path) -> None:
    with pytest.raises(EngineDead, match="numba is imported in the process that is to start vLLM"):
        await VllmEngine.start(SETTINGS)


def test_a_bare_engine_beside_numba_is_refused_with_the_reason(numba_first: Path) -> None:
    arguments = ["0", str(os.getpid()), "128", "model"]  # descriptor, parent, context, model: none is looked at
    ran = subprocess.run(
        [sys.executable, str(BARE), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert "numba is imported in the process that is to start vLLM" in ran.stderr
