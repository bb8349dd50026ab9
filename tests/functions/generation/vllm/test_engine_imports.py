"""No process that starts vLLM has numba in it: vLLM's registry of CPU kernels fails at llvmlite's objects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.repository import ROOT

BARE = ROOT / "benchmarks" / "bare.py"

INSIDE = ("core", "drafting", "kv_files", "fp8", "lora_repairs", "lora_slots", "read_back", "routes", "scheduler",
          "verification", "weight_engine")  # fmt: skip
"""Modules of functions/generation/vllm that are imported beside vLLM."""

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
