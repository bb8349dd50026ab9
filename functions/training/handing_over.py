"""The state of a group of ranks that ends, for the group that comes in its place: on other devices, of another number.

Each rank writes its part to shared memory, to a folder of its node. A node that will have ranks of the next group pulls
the parts that it lacks from the ranks that wrote them, through Ray's object stores, before these end. So every node of
the next group has the whole state in its own memory, and nothing goes to a disk.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayError

from rlhfless.functions.on_node import on_node
from rlhfless.functions.ranks.group import RankGroup
from rlhfless.util.free_memory import COPIES_SHARE, free_bytes

PIECE_BYTES = 64 << 20
"""Of a file, in one call: long enough that its start does not count."""

PIECES = 4
"""Pieces of a pull under way at once, in the object stores of both nodes: one that is written, and others on their
way."""

log = logging.getLogger(__name__)

Sizes = Mapping[str, int]
"""The files that a rank can give, with their bytes."""


def files_at(folder: Path) -> dict[str, int]:
    """The files of a state, by their path in its folder, with their bytes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def piece_at(path: Path, start: int) -> npt.NDArray[np.uint8]:
    """The piece `[bytes]` of a file that begins at a byte."""
    return np.fromfile(path, np.uint8, PIECE_BYTES, offset=start)


async def bring(group: RankGroup, folder: str, home: Sequence[str], nodes: Sequence[str], limit_s: float) -> bool:
    """Bring the state that the ranks of a group have written to the same folder of each of `nodes`; whether it is
    there. `home`: the nodes of the ranks, by rank."""
    given: list[Sizes] = await group.all("handed_over", folder)
    first = {node: rank for rank, node in reversed([*enumerate(home)])}  # one rank of each node gives all that is there
    lacking = {
        node: [(group.ranks[rank], given[rank]) for other, rank in first.items() if other != node] for node in nodes
    }
    pulls = [on_node(node, pull, folder, node, sources) for node, sources in lacking.items() if sources]
    try:
        async with asyncio.timeout(limit_s):
            return all(await asyncio.gather(*pulls))
    except (TimeoutError, RayError) as error:
        log.warning("the learner's state did not come to other nodes: %s: %s", type(error).__name__, error)
        for each in pulls:
            ray.cancel(each, force=True)
        return False


def pull(folder: str, node: str, sources: Sequence[tuple[Any, Sizes]]) -> bool:
    """Pull files from ranks of other nodes to this one, whose Ray id is `node`. Returns False, and leaves nothing,
    where there is no memory for them."""
    here = Path(folder) / node
    here.mkdir(parents=True, exist_ok=True)
    needed = sum(sum(sizes.values()) for _, sizes in sources)
    room = min(free_bytes() * COPIES_SHARE, shutil.disk_usage(here).free)
    try:
        if needed > room:
            raise MemoryError(f"{needed} bytes are more than the {room:.0f} that this node can give")
        for rank, sizes in sources:
            _pull_from(rank, folder, here, sizes)
    except (OSError, MemoryError) as error:
        log.warning("the learner's state could not be pulled to %s: %s", here, error)
        shutil.rmtree(here, ignore_errors=True)
        return False
    return True


def _pull_from(rank: Any, folder: str, here: Path, sizes: Sizes) -> None:
    """Pull the files of one rank, with `PIECES` pieces on their way."""
    asked: deque[tuple[str, int, Any]] = deque()
    for name, start in _pieces(sizes):
        asked.append((name, start, rank.give.remote(folder, name, start)))
        if len(asked) >= PIECES:
            _write(here, *asked.popleft())
    while asked:
        _write(here, *asked.popleft())


def _pieces(sizes: Sizes) -> Iterator[tuple[str, int]]:
    """The name of a file and the first byte, of each piece; an empty file has one."""
    for name, size in sizes.items():
        yield from ((name, start) for start in range(0, max(size, 1), PIECE_BYTES))


def _write(here: Path, name: str, start: int, piece: Any) -> None:
    path = here / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.write(memoryview(ray.get(piece)))
