"""Each use of a private API of a dependency is in the list, and the installed dependency is as the list says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import private_uses
import pytest
from contracts import fault_of_name, fault_of_text, message
from private_apis import NAMES, TEXTS, VARIABLES, VLLM_NAMES, PrivateName, SourceText
from private_uses import ROOT, Finder, Use, uses

HERE = Path(__file__).parent
LISTED = (*NAMES, *VLLM_NAMES, *TEXTS, *VARIABLES)


@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: entry.name)
def test_a_private_name(entry: PrivateName) -> None:
    fault = fault_of_name(entry)
    assert not fault, message(entry, fault)


@pytest.mark.parametrize("entry", [*TEXTS, *VARIABLES], ids=lambda entry: entry.text.splitlines()[0])
def test_a_text_in_a_dependency(entry: SourceText) -> None:
    fault = fault_of_text(entry)
    assert not fault, message(entry, fault)


@pytest.fixture(scope="module")
def faults_of_vllm() -> dict[str, str]:
    """By name; found in a process of its own, because vLLM cannot be imported beside numba."""
    command = [sys.executable, str(HERE / "contracts.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["KvFiles", "StoreWeightTransferEngine"])
def test_our_classes_have_all_that_vllm_asks_of_them(kind: str, faults_of_vllm: dict[str, str]) -> None:
    assert not faults_of_vllm[kind], f"vLLM's base class of {kind} asks for {faults_of_vllm[kind]}"


@pytest.mark.engine
@pytest.mark.parametrize("entry", VLLM_NAMES, ids=lambda entry: entry.name)
def test_a_private_name_of_vllm(entry: PrivateName, faults_of_vllm: dict[str, str]) -> None:
    fault = faults_of_vllm[entry.name]
    assert not fault, message(entry, fault)


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (PrivateName("ray._private.state.gone", ("a.py",), "see"), "has no attribute 'gone'"),
        (PrivateName("ray._private.no_more.state", ("a.py",), "see"), "has no attribute 'no_more'"),
        (PrivateName("ray._private.worker.print_to_stdstream", ("a.py",), "see", takes=("data", "prefix")), "it takes"),
        (PrivateName("ray._private.worker.print_to_stdstream", ("a.py",), "see", takes=("data",)), "it also needs"),
        (PrivateName("ray._private.state.state", ("a.py",), "see", has=("gone",)), "it has no gone"),
        (SourceText("no such text", "ray/_private/node.py", ("a.py",), "see"), "does not have it"),
        (SourceText("any", "ray/_private/no_more.py", ("a.py",), "see"), "there is no ray/_private/no_more.py"),
    ],
)
def test_a_dependency_that_has_changed_is_told(entry: PrivateName | SourceText, fault: str) -> None:
    found = fault_of_name(entry) if isinstance(entry, PrivateName) else fault_of_text(entry)
    assert fault in found
    assert message(entry, found).startswith("ray 2.")
    assert message(entry, found).endswith("a.py use it: see")


def test_a_use_without_an_entry_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_uses, "ROOT", tmp_path)
    (tmp_path / "own.py").write_text(
        "import ray, torch\nfrom vllm import LLM\nfrom vllm.v1.request import Request\n"
        "from ray._private import worker\n"
        "class Own:\n    def __init__(self): self._mine = 1\n    def f(self, other): return self._mine, other._theirs\n"
        "worker.log = ray.init(_temp_dir='x')\nsetattr(torch, '_hidden', 1)\nNAME = 'RAY_any_switch'\n"
    )
    found = {use.what for use in Finder(tmp_path / "own.py").uses()}
    assert found == {
        "vllm.v1.request.Request", "ray._private.worker", "_theirs", "ray._private.worker.log", "ray.init._temp_dir",
        "_hidden", "RAY_any_switch",
    }  # fmt: skip


def test_every_use_is_listed() -> None:
    missing = [f"{use.file}:{use.line} uses {use.what}" for use in uses() if not any(map(use_of(use), LISTED))]
    assert not missing, f"not in {HERE.name}/private_apis.py: {'; '.join(missing)}"


def use_of(use: Use) -> Callable[[PrivateName | SourceText], bool]:
    """Whether an entry is of this use."""

    def covers(entry: PrivateName | SourceText) -> bool:
        if use.file not in entry.users:
            return False
        leaf = use.what.rpartition(".")[2]
        if isinstance(entry, SourceText):
            return use.what == entry.text or f'"{leaf}"' in entry.text
        names = (entry.name, *(f"{entry.name}.{name}" for name in (*entry.has, *entry.takes)))
        return (
            use.what in names
            or (leaf.startswith("_") and leaf in {name.rpartition(".")[2] for name in names})
            or (any(name.startswith(f"{use.what}.") for name in names))
        )

    return covers


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: getattr(entry, "name", None) or entry.text.splitlines()[0])
def test_what_is_listed_is_used(entry: PrivateName | SourceText) -> None:
    for user in entry.users:
        assert (ROOT / user).is_file(), f"private_apis.py lists {user}, which is no more"
        if entry in TEXTS:  # which need not be ours, too
            continue
        names = (
            {entry.name.rpartition(".")[2], *entry.has, *entry.takes}
            if isinstance(entry, PrivateName)
            else {entry.text}
        )
        source = (ROOT / user).read_text()
        assert any(name in source for name in names), f"private_apis.py lists {user}, which uses none of {names}"
