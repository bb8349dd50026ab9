"""Create the pools of a run's functions from its spec, with the devices and settings of each replica, and check that
the nodes of a joined cluster have room for the run."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.each_node import on_each_node
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Recorder
from rlhfless.fleet.replicas import Blueprint
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.fleet.shared_devices import SharedDevices
from rlhfless.fleet.shared_engines import SharedEngines
from rlhfless.fleet.turns import Turns, take_turns
from rlhfless.functions.calls import Call
from rlhfless.functions.launching import Launch
from rlhfless.orchestrator.host import DevicesWanted
from rlhfless.planning.host_memory import Needed, Room, on_this_node, room_at, room_problems, store_base
from rlhfless.planning.inputs import planned, shape_of, shared_kv_bytes
from rlhfless.planning.preflight import Prepared
from rlhfless.records import FunctionRole, Prompt
from rlhfless.scaling.fleets import fleet_key, shared_tokens, terms_of
from rlhfless.scaling.function_specs import fleet_functions, kinds_of, name_of, publisher_of
from rlhfless.scaling.memory import CACHED_VERSIONS, published_bytes, stored_versions
from rlhfless.scaling.placement import CPU_KIND, Device, Node, Placement
from rlhfless.spec import RunSpec, Transport
from rlhfless.spec.errors import InputError
from rlhfless.spec.imports import load_target
from rlhfless.util.errors import UserError
from rlhfless.weights.address import StoreAddress


class TransportRefused(UserError):
    """The transport cannot bring the weights to the actors with this placement."""

    where = "weights.transport"


def transport_of(spec: RunSpec, placement: Placement) -> Transport:
    """Resolve `weights.transport`. With `http`, actors on the learner's node read the store directly. Raises
    TransportRefused."""
    asked = spec.weights.transport
    if asked == "auto":
        return on_this_node(spec) if spec.placement.ray_address is None else "http"
    if asked in ("cuda_ipc", "nccl") and (why := _keeps_from_gpus(asked, spec, placement)):
        raise TransportRefused(f"weights.transport is {asked}, but {why}; set weights.transport to auto")
    if asked == "shared_memory" and spec.placement.ray_address is None and on_this_node(spec) != asked:
        raise TransportRefused(
            f"weights.transport is {asked}, but {str(store_base(spec))!r} is not in memory; set it to file, or "
            "weights.folder to a folder in memory"
        )
    return asked


def _keeps_from_gpus(asked: Transport, spec: RunSpec, placement: Placement) -> str | None:
    """Return why a transport between GPUs cannot work with this placement; None if it can."""
    actors = placement.allocations[name_of(spec, FunctionRole.SAMPLES)]
    allocation = placement.allocation(publisher_of(spec), 0)
    learner = allocation.devices
    nodes = {group.node for group in placement.groups_of(allocation)}
    if asked == "cuda_ipc" and len(nodes) > 1:
        return f"the learner's ranks are on {len(nodes)} nodes, and it works on one"
    for number, actor in enumerate(actors):
        for device in (*actor.devices, *learner):
            if device.kind == CPU_KIND:
                return f"{device.name} is a CPU core, and it copies between GPUs"
        if asked == "cuda_ipc" and (apart := set(actor.devices) - set(learner)):
            return f"actor {number} is on {_names(apart)}, where the learner, on {_names(learner)}, has no rank"
        if asked == "nccl" and (both := set(actor.devices) & set(learner[:1])):
            return f"actor {number} and the learner's first rank share {_names(both)}: a broadcast goes between GPUs"
    return None


def _names(devices: Iterable[Device]) -> str:
    return ", ".join(device.name for device in devices)


_STOP_S = 10.0

# Import only the standard library: the process lives as long as the run, and must stay cheap.
_PROGRAM = """
import shutil, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.buffer.read()
for folder in sys.argv[1:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


@contextmanager
def shm_cleanup(folders: Sequence[Path]) -> Iterator[None]:
    """Start a process that removes the folders at the end of the block, or when this process dies."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, folders)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_STOP_S)


PROBE_TOKENS = 128
"""Length of the probe: long enough for a stable mean over its tokens, short enough to cost one small prefill."""

PROBE_PROMPTS = 8
"""The probe joins the ends of this number of prompts. Prompts differ most at their end."""

READER_SHARE = 0.9
"""Share of `timeouts.sync_s` after which an engine gives up a learner that does not feed it. It is below 1 because the
engine's error states the cause, while the driver's timeout would not."""

TOKEN_FILE = "store.token"


def launch_of(
    spec: RunSpec, prepared: Prepared, placement: Placement, run_id: str, run_folder: Path, kv_bytes: int | None = None
) -> Launch:
    """Return the settings with which a run's functions are launched. Raises TransportRefused.

    `kv_bytes`: see Session.
    """
    shape, tokens = prepared.shape, longest_tokens(prepared)
    home, cache = store_folders(spec, run_id)
    transport = transport_of(spec, placement)
    token = _store_token(run_folder) if transport in ("http", "nccl") else ""
    return Launch(
        spec=spec,
        run_id=run_id,
        run_folder=run_folder,
        shape=shape,
        max_model_len=tokens,
        probe_token_ids=probe_text(prepared.train, tokens - 1),
        store_folder=home,
        store_token=token,
        # Actors on other nodes read the store through a cache on their node.
        store=StoreAddress(
            transport,
            str(cache if token else home),
            token,
            str(home) if token else "",
            READER_SHARE * spec.timeouts.sync_s,
        ),
        planned_bytes=lambda kind: planned(spec, shape, kind, tokens),
        kv_bytes=lambda kind: kv_bytes or shared_kv_bytes(spec, shape, kind),
    )


def longest_tokens(prepared: Prepared) -> int:
    """Return the length of the longest sequence that the run's engines take."""
    if prepared.spec.placement.share is None:
        return prepared.max_model_len
    context = prepared.spec.model.max_context_tokens or shape_of(prepared.spec)[1].get("max_position_embeddings")
    return shared_tokens(prepared.max_model_len, context)


def fleets_of(prepared: Prepared) -> Mapping[str, str]:
    """Return the fleet that shares the replicas of a function, by function; empty for a run that shares none."""
    if not (functions := fleet_functions(prepared.spec)):
        return {}
    return dict.fromkeys(functions, fleet_key(terms_of(prepared.spec, longest_tokens(prepared))))


def pools_of(
    launch: Launch, call: Call, cluster: Cluster, recorder: Recorder, placement: Placement, devices: RunDevices
) -> tuple[dict[str, ReplicaPool], list[Turns]]:
    """Create the pool of each function, by name, and the turns of pools that share devices, without starting them."""
    spec, pools, shared = launch.spec, {}, fleet_functions(launch.spec)
    for kind in kinds_of(spec):
        deployment = load_target(kind.shared if kind.name in shared else kind.deployment)
        settings = partial(deployment.settings_of, launch, kind)
        blueprint = Blueprint(kind, deployment, settings, placement.allocations[kind.name], kind.bounds(spec))
        starts = SharedEngines(cluster, devices, call) if kind.name in shared else cluster
        pools[kind.name] = ReplicaPool(starts, devices, blueprint, call, spec.timeouts, recorder)
    if not spec.placement.in_turns:
        return pools, []
    taking = [pool for name, pool in pools.items() if name not in shared]
    return pools, take_turns(taking, partial(SharedDevices, devices) if devices.shared else None)


def probe_text(prompts: Sequence[Prompt], most_tokens: int) -> tuple[int, ...]:
    """Return the tokens of the probe `[probe]`: ends of prompts spread over the data set, repeated up to PROBE_TOKENS
    or `most_tokens`, whichever is less."""
    chosen = random.Random(0).sample(range(len(prompts)), min(len(prompts), PROBE_TOKENS))
    ends = [prompts[index].token_ids[-(PROBE_TOKENS // PROBE_PROMPTS) :] for index in chosen]
    text = itertools.chain.from_iterable(itertools.cycle(ends))
    return tuple(itertools.islice(text, min(PROBE_TOKENS, most_tokens)))


def _store_token(folder: Path) -> str:
    """Return the secret of the run's store; create it if missing. It is kept in a file that only the run's owner can
    read, so that a resumed driver can adopt replicas that have it."""
    file = folder / TOKEN_FILE
    if not file.exists():
        new = file.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(32))
        new.replace(file)
    return file.read_text()


def store_folders(spec: RunSpec, run_id: str) -> tuple[Path, Path]:
    """Return the folder of the run's weights, and the folder of a node's cache of them."""
    folder = store_base(spec) / (run_id if spec.weights.folder else f"rlhfless-{run_id}")
    return folder, Path(f"{folder}-cache")


def remove_stores(spec: RunSpec, run_id: str) -> None:
    """Remove the run's weights from this machine. Does nothing if the run joined a cluster."""
    if not spec.placement.ray_address:
        for folder in store_folders(spec, run_id):
            shutil.rmtree(folder, ignore_errors=True)


def devices_wanted(spec: RunSpec, placement: Placement) -> DevicesWanted:
    """Return the minimum and maximum of devices that a run can use. Devices of a learner of another kind are always in
    use, and are not counted."""
    kind = _kind_of(spec, placement)
    engines = (FunctionRole.SAMPLES, FunctionRole.PREFILLS)
    fewest = {each.name: each.bounds(spec).fewest for each in kinds_of(spec) if each.role in engines}
    allocations = [each for name, of in placement.allocations.items() for each in of[: fewest.get(name)]]
    needed = {group.name for allocation in allocations for group in placement.groups_of(allocation)}
    groups = [group for group in placement.groups if group.kind == kind]
    return DevicesWanted(
        kind,
        minimum=sum(len(group.devices) for group in groups if group.name in needed),
        maximum=sum(len(group.devices) for group in groups),
        unit=spec.generation.engine.devices_per_actor,
        tenants=spec.placement.tenants,
    )


ROOM_S = 60.0
"""Timeout for the nodes' answers; a process on each takes seconds. A node without an answer is not checked."""


async def require_room(
    spec: RunSpec, prepared: Prepared, placement: Placement, nodes: Sequence[Node], own: Sequence[Path]
) -> None:
    """Check that each node has room for storing the run's weights and loading the models. `own`: folders with weights
    of a resumed run, which are already there. Raises InputError with the shortage of each node."""
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
    """Return the memory that the run needs on each node with the learner or actors, by node; empty if sizes are
    unknown."""
    if prepared.shape is None:
        return {}
    size = published_bytes(prepared.shape, spec)
    learner = placement.allocation(publisher_of(spec), 0).devices
    loading = 0 if prepared.resolved is None else prepared.resolved.loading_bytes()
    ranks = Counter(device.node for device in learner)
    engines = [each.name for each in kinds_of(spec) if each.role in (FunctionRole.SAMPLES, FunctionRole.PREFILLS)]
    actors = {device.node for name in engines for each in placement.allocations[name] for device in each.devices}
    kept = {learner[0].node: stored_versions(spec)}
    return {
        node: Needed(size, kept.get(node, CACHED_VERSIONS), loading * ranks[node] // len(learner))
        for node in sorted(actors | ranks.keys())
    }


def _kind_of(spec: RunSpec, placement: Placement) -> str:
    """Return the kind of the run's devices; if the learner has another kind, that of the generation actors."""
    apart = spec.placement.learner_kind is not None
    name = name_of(spec, FunctionRole.SAMPLES) if apart else publisher_of(spec)
    return placement.allocation(name, 0).devices[0].kind
