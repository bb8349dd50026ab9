"""The user's own modules (rewards, algorithm, schedule, policy) on the nodes of a cluster that is joined.

On one machine all processes import from the same folders. Other nodes do not have them, so the modules that the spec
names are sent with the run: copied into one folder, which Ray gives every process of the run as its working directory.
A module that is installed (in an image, say) is imported from there.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfless.fleet.each_node import on_each_node
from rlhfless.spec import RunSpec
from rlhfless.spec.imports import TargetError, load_target
from rlhfless.spec.targets import targets
from rlhfless.util.errors import UserError
from rlhfless.util.folders import private

SUFFIX = ".py"
"""Only modules are sent: other files beside them may be data, models or secrets."""

MOST_FILES, MOST_BYTES, MOST_FILE_BYTES = 2_000, 32 << 20, 1 << 20
"""Bounds on what is sent: Ray keeps it in its control store, and unpacks it once on each node."""

NOT_THEIRS = frozenset({"__pycache__", "node_modules", "site-packages"})
"""Folders that are never copied; nor are hidden ones, and virtual environments."""

IMPORT_S = 120.0
"""Longest wait for a node to import the user's modules: a new process there, and whatever they import."""


class CodeNotThere(UserError):
    """Modules that the spec names cannot be brought to the nodes, or not imported there."""


def gather_modules(spec: RunSpec, run_folder: Path) -> Path | None:
    """Copy the modules that the spec names, and those beside them, to a folder in the run's, for its user alone.
    Returns the folder; None if all modules are installed. Raises CodeNotThere if they are too many or too large."""
    folders = {folder for target in targets(spec) if (folder := _folder_of(target)) is not None}
    if not folders:
        return None
    code = run_folder / "code"
    shutil.rmtree(code, ignore_errors=True)
    private(code)
    left = [MOST_FILES, MOST_BYTES]
    for folder in sorted(folders):
        _copy(folder, code, left)
    return code


def check_on_nodes(spec: RunSpec, code: Path | None) -> None:
    """Check that every node can import what the spec names, and has what was sent to it (`code`). Raises CodeNotThere,
    which names the node."""
    digests = {} if code is None else _digests(code)
    faults = on_each_node(node_faults, targets(spec), digests, timeout_s=IMPORT_S)
    for node, fault in faults.items():
        if fault is not None:
            raise CodeNotThere(
                f"node {node}: {fault}. What a spec's own modules import must lie beside them, or be installed on all "
                "nodes"
            )


def node_faults(paths: Sequence[str], digests: Mapping[str, str]) -> str | None:
    """The fault of this node, whose working directory is where Ray has unpacked the modules; None if there is none.

    Ray lets all users write to that folder, and gives them the right again whenever a worker starts. Changes before the
    run begins are found; only a private temporary folder of Ray's prevents later ones.
    """
    if digests:
        for cache in Path.cwd().rglob("__pycache__"):
            shutil.rmtree(cache, ignore_errors=True)  # a run beside this one may have begun to fill it again
        changed = [name for name, digest in _digests(Path.cwd()).items() if digests.get(name) != digest]
        if changed:
            return f"another process has changed what Ray unpacked in {Path.cwd()}: {', '.join(sorted(changed))}"
    return import_faults(paths)


def _digests(folder: Path) -> dict[str, str]:
    """The digest of each file that Python could import, by the path below the folder."""
    kinds = tuple(importlib.machinery.all_suffixes())
    files = [file for file in folder.rglob("*") if file.name.endswith(kinds) and file.parent.name != "__pycache__"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def import_faults(paths: Sequence[str]) -> str | None:
    """Why the first of these import paths that fails cannot be imported on this node; None if all can."""
    try:
        for path in paths:
            load_target(path)
    except TargetError as error:
        return str(error)
    return None


def _folder_of(target: str) -> Path | None:
    """The folder from which a target is imported; None if it is installed."""
    load_target(target)  # as it was when the spec was checked: the current folder is searched, too
    spec = importlib.util.find_spec(target.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    folder = file.parent.parent if spec.submodule_search_locations else file.parent
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return None if installed & {folder, *folder.parents} else folder


def _copy(folder: Path, into: Path, left: list[int]) -> None:
    """Copy the modules of a folder. `left`: files and bytes that may still be copied. Files that an earlier folder has
    put there stay."""
    for path, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in NOT_THEIRS and name[0] != "." and not (Path(path, name) / "pyvenv.cfg").exists()
        ]
        for name in names:
            file, target = Path(path, name), into / Path(path).relative_to(folder) / name
            if file.suffix != SUFFIX or target.exists() or file.stat().st_size > MOST_FILE_BYTES:
                continue
            left[0], left[1] = left[0] - 1, left[1] - file.stat().st_size
            if min(left) < 0:
                raise CodeNotThere(
                    f"{str(folder)!r}, which holds modules that the spec names, has more than {MOST_FILES} files or "
                    f"{MOST_BYTES >> 20} MiB of code. Move the modules to a folder of their own, or install them"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
