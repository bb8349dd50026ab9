"""Prepare every node of a joined cluster: run small tasks, fetch models from the hub, and send the user's own modules.

On one machine, all processes import from the same folders. Other nodes do not have the user's modules (rewards,
algorithm, schedule, policy), so they are sent with the run: they are copied into one folder, which Ray makes the
working directory of all processes of the run. Installed modules, such as those in an image, are not sent.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state
from ray.exceptions import RayError, RayTaskError

from rlhfless.scaling.latency.devices import NODE_LABEL
from rlhfless.spec import RunSpec
from rlhfless.spec.data import is_path, shadowed
from rlhfless.spec.imports import TargetError, load_target
from rlhfless.spec.load import targets
from rlhfless.util.errors import UserError, class_and_line
from rlhfless.util.folders import private

log = logging.getLogger(__name__)


def on_node(node: str, work: Callable[..., object], *arguments: object) -> Any:
    """Run `work` on a node, in a separate process without devices, and return Ray's reference to its result."""
    options = {"num_cpus": 0, "num_gpus": 0, "max_retries": 0, "max_calls": 1, "label_selector": {NODE_LABEL: node}}
    task: Any = ray.remote(**options)(work)  # type: ignore[call-overload]  # Ray's types know no labels
    return task.remote(*arguments)


def node_address() -> str:
    """Return the address of this process's node, as Ray knows it."""
    return ray.util.get_node_ip_address()


def staying_nodes() -> list[dict[str, Any]]:
    """Return Ray's reports of the live nodes that are not being drained."""
    leaving = state.get_draining_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]


def on_each_node(
    work: Callable[..., object], *arguments: object, timeout_s: float, with_cores: bool = False
) -> dict[str, object]:
    """Run `work` on each node that stays, and return the results by node address. A node without a result, as in
    `ask_each_node`, is logged as a warning."""
    results, faults = ask_each_node(work, *arguments, timeout_s=timeout_s, with_cores=with_cores)
    for address, fault in faults.items():
        log.warning("%s on node %s: %s", work.__name__, address, fault)
    return results


def ask_each_node(
    work: Callable[..., object], *arguments: object, timeout_s: float, with_cores: bool = False
) -> tuple[dict[str, object], dict[str, str]]:
    """Run `work` on each node that stays: Ray starts nothing on one that is being drained. Return results and faults by
    node address: a fault if the node is lost, or `work` raises or times out there.

    `with_cores`: only nodes that can run functions, excluding a head that is reserved for drivers.
    """
    nodes = [node for node in staying_nodes() if node["Resources"].get("CPU") or not with_cores]
    calls = {on_node(node["NodeID"], work, *arguments): node["NodeManagerAddress"] for node in nodes}
    ended, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    faults = {calls[call]: f"it did not end within {timeout_s:.0f} s" for call in late}
    results: dict[str, object] = {}
    for call in ended:
        try:
            results[calls[call]] = ray.get(call)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            faults[calls[call]] = str(cause) if isinstance(cause, UserError) else class_and_line(cause)
    return results, faults


def remove_folders(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.jinja")
"""Model files that transformers and vLLM read. Other formats of the same weights are not fetched; they may be as
large."""


class ModelNotThere(UserError):
    """A node could not fetch a model from the hub."""


def hub_models(spec: RunSpec) -> tuple[str, ...]:
    """Return the models and tokenizers of a run that come from the hub rather than from a folder."""
    critic = {spec.critic_source.path} if spec.critic is not None else set()
    teachers = {each.path for each in spec.teachers if not each.is_self}
    rewards = {model.path for model in spec.reward_models} | {judge.path for judge in spec.judges}
    named = {spec.model.path, spec.model.tokenizer, *rewards, *critic, *teachers}
    return tuple(sorted(name for name in named if name and not is_path(name)))


def fetch_on_nodes(models: Sequence[str], timeout_s: float) -> None:
    """Fetch models on every node. Raises ModelNotThere with the nodes that failed."""
    by_node = on_each_node(fetch_fault, models, timeout_s=timeout_s)
    faults = [f"node {node}: {fault}" for node, fault in by_node.items() if fault is not None]
    if not by_node:
        faults.append(f"no node had it within timeouts.download_s ({timeout_s:.0f} s)")
    if faults:
        raise ModelNotThere(f"{', '.join(models)} could not be fetched: {'; '.join(faults)}")


def fetch_fault(models: Sequence[str]) -> str | None:
    """Fetch models into this node's cache; return the first fault, or None."""
    from huggingface_hub import snapshot_download

    for model in models:
        if why := shadowed(model):
            return why
        try:
            snapshot_download(model, allow_patterns=list(FILES))
        except Exception as error:  # from the hub, its HTTP library, or the disk
            return f"{model}: {type(error).__name__}: {error}"
    return None


SUFFIX = ".py"
"""Only modules are sent: other files in their folders may be data, models or secrets."""

MOST_FILES, MOST_BYTES, MOST_FILE_BYTES = 2_000, 32 << 20, 1 << 20
"""Limits of the modules sent: Ray keeps them in its control store, and unpacks them once on each node."""

NOT_THEIRS = frozenset({"__pycache__", "node_modules", "site-packages"})
"""Folders that are never copied, like hidden folders and virtual environments."""

IMPORT_S = 120.0
"""Timeout for a node to import the user's modules and their dependencies in a new process."""


class CodeNotThere(UserError):
    """Modules that the spec names could not be sent to the nodes, or not imported there."""


def gather_modules(spec: RunSpec, run_folder: Path) -> Path | None:
    """Copy the modules that the spec names, with all modules in their folders, into a private folder of the run. Return
    the folder; None if all modules are installed. Raises CodeNotThere if they are too many or too large."""
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
    """Check that every node can import the spec's modules, and has exactly the sent ones (`code`). Raises CodeNotThere
    with the node."""
    digests = {} if code is None else _digests(code)
    faults = on_each_node(node_faults, targets(spec), digests, timeout_s=IMPORT_S)
    for node, fault in faults.items():
        if fault is not None:
            raise CodeNotThere(
                f"node {node}: {fault}. Modules that your own code imports must be in the same folder, or installed on "
                "all nodes"
            )


def node_faults(paths: Sequence[str], digests: Mapping[str, str]) -> str | None:
    """Check the modules that Ray unpacked into this process's working directory; return a fault, or None.

    Ray makes that folder writable for all users, and does so again whenever a worker starts. This detects changes
    before the run starts; only a private temporary folder of Ray prevents later ones.
    """
    if digests:
        for cache in Path.cwd().rglob("__pycache__"):
            shutil.rmtree(cache, ignore_errors=True)  # another run may be filling it again
        changed = [name for name, digest in _digests(Path.cwd()).items() if digests.get(name) != digest]
        if changed:
            return f"another process has changed what Ray unpacked in {Path.cwd()}: {', '.join(sorted(changed))}"
    return import_faults(paths)


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file that Python could import, by its path relative to the folder."""
    kinds = tuple(importlib.machinery.all_suffixes())
    files = [file for file in folder.rglob("*") if file.name.endswith(kinds) and file.parent.name != "__pycache__"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def import_faults(paths: Sequence[str]) -> str | None:
    """Return the error of the first path that cannot be imported on this node; None if all can."""
    try:
        for path in paths:
            load_target(path)
    except TargetError as error:
        return str(error)
    return None


def _folder_of(target: str) -> Path | None:
    """Return the folder from which a target is imported; None if it is installed."""
    load_target(target)  # import as in the check of the spec, which also searches the current folder
    spec = importlib.util.find_spec(target.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    folder = file.parent.parent if spec.submodule_search_locations else file.parent
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return None if installed & {folder, *folder.parents} else folder


def _copy(folder: Path, into: Path, left: list[int]) -> None:
    """Copy the modules of a folder, without replacing files of earlier folders. `left`: remaining files and bytes."""
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
