"""Free memory on a node: for versions of the weights in the store's folder (in shared memory by default), and for
processes in host memory. Only the node itself knows how much of both is free."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfless.scaling.memory import GIB
from rlhfless.spec import RunSpec, Transport
from rlhfless.spec.errors import Problem
from rlhfless.util.folders import in_memory
from rlhfless.util.host import free_bytes

SHARED_MEMORY = Path("/dev/shm")

CHART_KEY = "ray.gpuGroups[].sharedMemory or ray.cpuGroup.sharedMemory"
"""The key of the Helm chart, for pods with and without GPUs."""

_OBJECT_STORE_SHARE = 8
_OBJECT_STORE_BYTES = (200 * 10**6, 8 * GIB)
"""Ray's part of a worker pod's shared memory in the chart's templates: an eighth, within these bounds."""


def chart_shared_memory(store_bytes: int) -> str:
    """Return the smallest `sharedMemory` of the chart for a node with `store_bytes` of weights, such as `74Gi`."""
    least, most = _OBJECT_STORE_BYTES
    rays = min(max(math.ceil(store_bytes / (_OBJECT_STORE_SHARE - 1)), least), most)
    return f"{math.ceil((store_bytes + rays) / GIB)}Gi"


def _hint(store_bytes: int) -> str:
    return (
        "free that much there (files of ended runs are rlhfless-*), give the file system more (containers: --shm-size; "
        f"the Helm chart: {CHART_KEY}: {chart_shared_memory(store_bytes)} or more), or set weights.folder to a folder "
        "with more room"
    )


@dataclass(frozen=True, slots=True)
class Room:
    """The free memory of a node."""

    folder: str
    """The existing folder that will contain the store or the cache."""
    store_bytes: int
    """Free bytes of its file system, plus bytes that the run itself has taken there."""
    in_memory: bool
    """Whether that file system is in memory."""
    memory_bytes: int
    """Memory available to a process."""


@dataclass(frozen=True, slots=True)
class Needed:
    """The memory that a run needs on a node."""

    version_bytes: int
    versions: int
    """Maximum number of versions of the weights there: in the learner's store (`stored_versions`), or in a cache of
    it (CACHED_VERSIONS)."""
    memory_bytes: int = 0
    """Bytes of its processes in host memory."""


def store_base(spec: RunSpec) -> Path:
    """Return the parent folder of a run's weights: shared memory if available, because it is faster than any disk."""
    if spec.weights.folder:
        return Path(spec.weights.folder)
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def on_this_node(spec: RunSpec) -> Transport:
    """Return the transport of the weights if all functions are on this node, given the location of their folder."""
    return "shared_memory" if in_memory(_nearest(str(store_base(spec)))) else "file"


def _nearest(folder: str) -> Path:
    """Return the folder, or its nearest existing parent."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path


def room_at(base: str, own: Sequence[str] = ()) -> Room:
    """Return the free memory of this node, for a store at `base`. `own` lists the run's existing folders there."""
    folder = _nearest(base)
    system = os.statvfs(folder)
    kept = sum(file.stat().st_blocks * 512 for each in own for file in Path(each).glob("*") if file.is_file())
    return Room(str(folder), system.f_bavail * system.f_frsize + kept, in_memory(folder), free_bytes())


def room_problems(needed: Needed, room: Room, node: str = "") -> list[Problem]:
    """Return the memory that a node lacks, with figures."""
    where = f"node {node}: " if node else ""
    store = needed.versions * needed.version_bytes
    problems = []
    if store > room.store_bytes:
        what = (
            f"{where}{room.folder!r} has {_gib(room.store_bytes)} free, and up to {needed.versions} versions of the "
            f"weights of {_gib(needed.version_bytes)} each are kept there: {_gib(store)}"
        )
        problems.append(Problem("weights.folder", what, _hint(store)))
    total = needed.memory_bytes + (store if room.in_memory else 0)
    if needed.memory_bytes and total > room.memory_bytes:
        what = (
            f"{where}{_gib(room.memory_bytes)} of memory are free, and the run takes up to {_gib(total)}: "
            f"{_gib(needed.memory_bytes)} for loading the models"
            + (f", and {_gib(store)} for the weights in {room.folder!r}" if room.in_memory else "")
        )
        hint = "end other programs or raise the container's limit; `rlhfless plan` says what takes how much"
        problems.append(Problem("placement", what, hint))
    return problems


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3g} GiB" if size_bytes >= GIB / 100 else f"{size_bytes / 2**20:.3g} MiB"
