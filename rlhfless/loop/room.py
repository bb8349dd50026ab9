"""Whether the nodes of a joined cluster have room for a run's weights and processes, before any of it is started."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfless.fleet.each_node import on_each_node
from rlhfless.prepare.memory.assumed import loading_bytes
from rlhfless.prepare.memory.room import Needed, Room, room_at, room_problems, store_base
from rlhfless.prepare.preflight import Prepared
from rlhfless.records import FunctionRole
from rlhfless.scaling.function_kinds import name_of
from rlhfless.scaling.memory import version_bytes
from rlhfless.scaling.placement import Node, Placement
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError

ROOM_S = 60.0
"""Longest wait for the nodes' answers: seconds for a process on each. A node without one is not judged."""


async def require_room(
    spec: RunSpec, prepared: Prepared, placement: Placement, nodes: Sequence[Node], own: Sequence[Path]
) -> None:
    """`own`: folders of the run's weights, which a run that is resumed has already. Raises InputError with what each
    node lacks."""
    needed = needed_by_node(spec, prepared, placement)
    folders = [str(folder) for folder in own]
    rooms = await asyncio.to_thread(on_each_node, room_at, str(store_base(spec)), folders, timeout_s=ROOM_S)
    addresses = {node.name: node.address for node in nodes}
    problems = [
        problem
        for name, needs in needed.items()
        if isinstance(room := rooms.get(address := addresses.get(name, "")), Room)
        for problem in room_problems(needs, room, address)
    ]
    if problems:
        raise InputError("the run cannot start on this cluster", problems)


def needed_by_node(spec: RunSpec, prepared: Prepared, placement: Placement) -> Mapping[str, Needed]:
    """By name of the node; of nodes without learner or actors nothing is needed. Empty if sizes are not known."""
    if prepared.shape is None:
        return {}
    size = version_bytes(prepared.shape, spec.model.dtype)
    learner = placement.allocation(name_of(spec, FunctionRole.UPDATES), 0).devices
    loading = loading_bytes(spec, learner[0].kind, len(_devices(placement, learner[0].kind)), prepared.max_model_len)
    ranks = Counter(device.node for device in learner)
    actors = {
        device.node for each in placement.allocations[name_of(spec, FunctionRole.SAMPLES)] for device in each.devices
    }
    return {
        node: Needed(size, learner=node == learner[0].node, memory_bytes=loading * ranks[node] // len(learner))
        for node in sorted(actors | ranks.keys())
    }


def _devices(placement: Placement, kind: str) -> set[str]:
    return {device.name for group in placement.groups if group.kind == kind for device in group.devices}
