"""Open a run from a checked spec: start or join Ray, start its functions, and close everything at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.each_node import (
    check_on_nodes,
    fetch_on_nodes,
    gather_modules,
    hub_models,
    on_each_node,
    remove_folders,
    targets,
)
from rlhfless.fleet.heartbeat import HEARTBEATS_PER_LEASE, LeaseRenewal
from rlhfless.fleet.leaving_watch import LeavingWatch, show_nodes
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.fleet.turns import Turns
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.host import DevicesWanted, Host
from rlhfless.orchestrator.launch import (
    devices_wanted,
    fleets_of,
    launch_of,
    pools_of,
    require_room,
    shm_cleanup,
    store_folders,
)
from rlhfless.orchestrator.ledger import NOTHING, Ledger, held_s
from rlhfless.orchestrator.prompt_selection import PromptHistory
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.run_scaler import scaler_of
from rlhfless.orchestrator.start_run import start_run, stop_functions
from rlhfless.orchestrator.supervised import SupervisedRun
from rlhfless.orchestrator.token_batches import TokenBatches
from rlhfless.orchestrator.weight_sync import ActorWeights, Feeding
from rlhfless.planning.inputs import DeviceCount, devices_of, shared_kv_bytes
from rlhfless.planning.preflight import Prepared
from rlhfless.planning.resolve import resolve
from rlhfless.planning.sizes import fitting_sizes
from rlhfless.prepare.prompt_order import order_of
from rlhfless.records import FunctionName, FunctionRole
from rlhfless.records.checkpoints import Checkpoints, checkpoints_of
from rlhfless.records.journal import Journal
from rlhfless.records.ledger import JOURNAL_FILE as JOURNAL_FILE
from rlhfless.records.ledger import TRACE_FOLDER
from rlhfless.records.traces import Trace, TraceMeta, TraceWriter, read_trace
from rlhfless.scaling.function_specs import name_of, place_run, publisher_of
from rlhfless.scaling.placement import NO_PLACEMENT, Node, Placement, with_held
from rlhfless.scaling.prices import PriceBook, load_price_book
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError
from rlhfless.spec.load import SPEC_FILE, resolved_yaml
from rlhfless.telemetry.sinks import MetricSinks, RunProgress
from rlhfless.util.host import describe_machine
from rlhfless.util.tasks import gather_or_cancel, is_stopping, to_the_end

log = logging.getLogger(__name__)

REMOVE_S = 10.0
"""Timeout for the nodes to remove a run's weights: a process takes seconds to start; the removal is immediate."""


@dataclass(frozen=True, slots=True)
class Session:
    """The inputs of a driver. `folder` belongs to the run; if it has earlier attempts, the run resumes from them."""

    prepared: Prepared
    run_id: str
    folder: Path
    console: RunProgress
    sinks: MetricSinks
    host: Host = field(default_factory=Host)
    priority: int = 0
    """Rank of the run among those that share devices."""
    granted: int = 0
    """Devices that the host has granted to an elastic run; 0 before, and for other runs."""
    kv_bytes: int | None = None
    """KV cache of an elastic run's engines on shared GPUs, which is the same at all of its sizes so that engines can
    stay; None for other runs, or if it is not planned."""

    @property
    def spec(self) -> RunSpec:
        return self.prepared.spec

    @property
    def checkpoints(self) -> Checkpoints:
        return checkpoints_of(self.folder, self.spec.checkpoint)


@asynccontextmanager
async def open_session(session: Session) -> AsyncIterator[tuple[BaseRun, int]]:
    """Yield the run, with its fleet started and its weights loaded, and its first step. Step 0 is the evaluation before
    step 1."""
    with contextlib.closing(Journal(session.folder / JOURNAL_FILE)) as journal:
        attempt, trace = journal.begin_attempt(), session.folder / TRACE_FOLDER
        earlier = read_trace(trace, tokens=False) if attempt > 1 and trace.exists() else None
        joined = bool(session.spec.placement.ray_address)
        code = gather_modules(session.spec, session.folder) if joined else None
        prices = load_price_book(session.spec.scaling.prices)
        if attempt > 1:
            newest = session.checkpoints.newest()
            session.console.resumed(newest.notes.step if newest else 0, attempt, held_s(earlier) if earlier else 0.0)
        with session.console.waiting("starting Ray"):
            cluster = await Cluster.start(session.spec.placement, session.folder, prices.kinds, code)
        try:
            await _reach_nodes(session, code)
            if joined:
                session = await _on_cluster(session, cluster)
            # The ledger records the spec, so it is opened after the spec is resolved for the devices.
            with contextlib.closing(_ledger(session, prices, attempt, earlier)) as ledger:
                async with _fleet(session, cluster, ledger, journal, earlier) as under_way:
                    yield under_way
        finally:
            await to_the_end(cluster.stop())


async def _reach_nodes(session: Session, code: Path | None) -> None:
    """Check the user's code on all nodes of the cluster, and fetch models there. Raises CodeNotThere, ModelNotThere."""
    spec = session.spec
    if spec.placement.ray_address and targets(spec):
        with session.console.waiting("importing your modules on every node"):
            await asyncio.to_thread(check_on_nodes, spec, code)
    if models := hub_models(spec):
        with session.console.waiting(f"fetching {', '.join(models)} on every node"):
            await asyncio.to_thread(fetch_on_nodes, models, spec.timeouts.download_s)


async def _on_cluster(session: Session, cluster: Cluster) -> Session:
    """Resolve the run for the devices of a joined cluster, and save its spec to the run's folder.

    Raises PlacementError if there are no devices, InputError if the run does not fit on them, and FleetError if an
    elastic run waits for its devices for too long.
    """
    spec, prepared, granted, kv_bytes = session.spec, session.prepared, 0, None
    nodes = await cluster.nodes(spec.placement.kind)
    on: Sequence[Node] | DeviceCount = nodes
    if spec.placement.size_range is not None:
        devices = devices_of(spec, nodes)
        present = sum(node.count(devices.kind) for node in nodes)
        present = max(present, session.host.capacity.get(devices.kind, 0))
        fitting = fitting_sizes(spec, devices.kind, present, prepared.max_model_len)
        sizes = tuple(each.devices for each in fitting)
        wanted = DevicesWanted(devices.kind, sizes[0], sizes[-1], unit=1, sizes=sizes, present=present)
        granted = await session.host.devices(wanted)
        on = replace(devices, count=granted)
        planned = [shared_kv_bytes(each.asked.spec, prepared.shape, devices.kind) for each in fitting if each.asked]
        kv_bytes = min(filter(None, planned), default=None)
    resolved = resolve(spec, on, prepared.max_model_len)
    if problems := resolved.problems(prepared.shape):
        raise InputError("the run cannot start on this cluster", problems)
    if not granted:  # an elastic run resumes with its sizes, on the devices that are there then
        (session.folder / SPEC_FILE).write_text(resolved_yaml(resolved.spec), "utf-8")
    return replace(session, prepared=prepared.on(resolved), granted=granted, kv_bytes=kv_bytes)


def _ledger(session: Session, prices: PriceBook, attempt: int, earlier: Trace | None) -> Ledger:
    spec, folder = session.spec, session.folder / TRACE_FOLDER
    spec_values: dict[str, Any] = spec.model_dump(mode="json")
    meta = TraceMeta(session.run_id, attempt, prices.snapshot(), spec_values, describe_machine())
    return Ledger(TraceWriter(folder, meta, spec.logging.record_tokens), prices, earlier or NOTHING)


@asynccontextmanager
async def _fleet(
    session: Session, cluster: Cluster, ledger: Ledger, journal: Journal, earlier: Trace | None
) -> AsyncIterator[tuple[BaseRun, int]]:
    spec = session.spec
    call = Call(session.run_id, journal.attempt, 0)
    shown, fleets = session.console.stage, fleets_of(session.prepared)
    devices = RunDevices(cluster, NO_PLACEMENT, call, spec, session.priority, shown, fleets)
    nodes, placement = await _placed(session, cluster, devices)
    folders = store_folders(spec, session.run_id)
    if spec.placement.ray_address:  # preflight has checked this machine
        await require_room(spec, session.prepared, placement, nodes, folders)
    devices.acquired = ledger.add_acquired
    launch = launch_of(spec, session.prepared, placement, session.run_id, session.folder, session.kv_bytes)
    if not session.granted:
        await session.host.devices(devices_wanted(spec, placement))
    by_name, turns = pools_of(launch, call, cluster, ledger, placement, devices)
    pools = list(by_name.values())
    lease_s = spec.recovery.lease_s
    renewal = LeaseRenewal(pools, devices, call, lease_s, lambda: ledger.keep_up(pools, lease_s / HEARTBEATS_PER_LEASE))
    watches = [asyncio.create_task(watch.run()) for watch in (renewal, LeavingWatch(pools, call))]
    watches += [asyncio.create_task(each.lend(call)) for each in turns]
    if session.host.watches_nodes and session.granted and session.prepared.resolved:
        kind = session.prepared.resolved.devices.kind
        watches.append(asyncio.create_task(show_nodes(cluster, kind, session.host.look)))
    run = _run_of(session, by_name, ledger, journal, earlier)
    scaler = run.scaler if isinstance(run, RLRun) else None
    if scaler is not None:
        devices.left_s = scaler.due.left_s
    actors = session.host.began(run, devices.held)
    if actors is not None and scaler is not None:
        scaler.fleet.limit_actors(actors)
    # On a joined cluster the folders may be on another machine: the learner removes them when its lease expires.
    with contextlib.nullcontext() if spec.placement.ray_address else shm_cleanup(folders):
        try:
            yield run, await _begin(session, run, cluster, devices, turns)
        finally:
            if scaler is not None:
                scaler.fleet.keep_starts()
            for watch in watches:
                watch.cancel()
            with session.console.waiting("stopping all functions"):
                if is_stopping():
                    ledger.keep_up(pools, 0.0)  # the stop may be cut short
                stay = session.host.changes_size
                await to_the_end(_stop(pools, devices, engines_stay=stay))
                if stay:
                    ledger.keep_up(pools, 0.0)  # until the run adopts them
                await to_the_end(_remove(folders, cluster, everywhere=bool(spec.placement.ray_address)))


async def _placed(session: Session, cluster: Cluster, devices: RunDevices) -> tuple[Sequence[Node], Placement]:
    """Return the nodes and the run's placement on them, and set the latter. An elastic run prefers devices that it
    holds."""
    nodes, held = await cluster.nodes(session.spec.placement.kind), None
    if session.granted:
        held = await devices.held_groups()
        nodes = with_held(nodes, held)
    devices.placement = place_run(session.spec, nodes, held)
    return nodes, devices.placement


def _run_of(
    session: Session, pools: Mapping[str, ReplicaPool], ledger: Ledger, journal: Journal, earlier: Trace | None
) -> BaseRun:
    spec, prepared = session.spec, session.prepared
    common: dict[str, Any] = {
        "run_id": session.run_id,
        "attempt": journal.attempt,
        "spec": spec,
        "order": order_of(prepared.train, spec.data, spec.seed),
        "held_out": prepared.held_out,
        "pools": pools,
        "ledger": ledger,
        "sinks": session.sinks,
        "journal": journal,
        "checkpoints": session.checkpoints,
    }
    if spec.supervised:
        return SupervisedRun(**common)
    call, history = Call(session.run_id, journal.attempt, 0), PromptHistory(spec)
    of_learner = pools[publisher_of(spec)] if spec.weights.transport == "cuda_ipc" else None
    feeding = None if of_learner is None else Feeding(of_learner, spec.timeouts.sync_s)
    if earlier is not None:
        history.read(earlier, session.folder / TRACE_FOLDER)
    return RLRun(
        **common,
        weights=ActorWeights(
            pools[name_of(spec, FunctionRole.SAMPLES)], spec, pools.get(FunctionName.PREFILL), feeding
        ),
        scaler=scaler_of(spec, prepared, call, [*pools.values()], ledger, history.lengths, earlier),
        history=history,
        batches=TokenBatches(spec, history),
    )


async def _remove(folders: Sequence[Path], cluster: Cluster, *, everywhere: bool) -> None:
    """Remove the run's weights here or on all nodes. Shared memory outlives the processes that wrote it."""
    names = [str(folder) for folder in folders]
    if everywhere and not cluster.lost:
        await asyncio.to_thread(on_each_node, remove_folders, names, timeout_s=REMOVE_S)
    await asyncio.to_thread(remove_folders, names)


async def _stop(pools: Sequence[ReplicaPool], devices: RunDevices, *, engines_stay: bool) -> None:
    """Stop all functions, and release their devices. `engines_stay`: except generation actors that are up; the run
    adopts those whose devices it keeps when it starts with its new size."""
    try:
        await stop_functions(pools, engines_stay=engines_stay)
    finally:
        if not engines_stay:
            await devices.close()


async def _begin(session: Session, run: BaseRun, cluster: Cluster, devices: RunDevices, turns: Sequence[Turns]) -> int:
    """Start the fleet, and return the first step."""
    left = await cluster.running(f"{run.run_id}-")
    await devices.adopt()
    held_until_s = run.ledger.held_until_s()
    await gather_or_cancel(
        *(pool.adopt([*left, *devices.engines], run.call(0), held_until_s) for pool in run.pools.values())
    )
    await devices.settle()
    await gather_or_cancel(*(each.put_all_to_sleep(run.call(0)) for each in turns))
    return await start_run(run, session.console)
