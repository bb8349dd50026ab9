"""A generation actor that the runs of a fleet share (`placement.share: adapters`): one engine with their adapters.

A run joins with its own terms, and from then on calls the actor as if it were alone. Its requests pass a fair queue
(fair_queue.py), its versions have their own slots, and the time of each iteration is split among the runs. A run whose
driver is gone is dropped when its lease ends; the actor itself ends with the lease of its last run. Only the loss of
the engine concerns all runs: each then joins its replacement.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rlhfless.functions.base import LeaseTerms
from rlhfless.functions.calls import Call, FunctionBroken, Reply, RunShare, SharedNow, StaleCall
from rlhfless.functions.devices import Planned
from rlhfless.functions.generation.deployment import GenerationFunction, GenerationSettings, remove_cache, terms_of
from rlhfless.functions.generation.engine import EngineError, EngineSettings, SharedEngine
from rlhfless.functions.generation.engine_function import EngineFunction
from rlhfless.functions.generation.fair_queue import FairQueue
from rlhfless.functions.generation.members import Member, MemberEngine, RunTerms
from rlhfless.functions.launching import Launch, binding, is_shared
from rlhfless.scaling import fleets
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec.imports import import_paths
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import WeightFileError

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval at which leases of runs are checked."""

LEAVE_S = 60.0
"""Longest wait for a run's requests to end when it leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings(GenerationSettings):
    """The settings of a shared actor. Those that `repr` shows are equal in all runs; the others are those of the run
    that starts it, and `run` of the one that joins."""

    lease: LeaseTerms = field(repr=False)
    engine: EngineSettings = field(repr=False)
    run_folder: str = field(repr=False)
    planned: Planned = field(default_factory=dict, repr=False)
    import_paths: tuple[str, ...] = field(default=(), repr=False)
    fleet: str
    terms: tuple[tuple[str, Any], ...]
    run: RunTerms = field(repr=False)


class SharedGenerationFunction(GenerationFunction):
    """A generation actor of several runs."""

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> SharedSettings:
        """Return the settings of a replica for an allocation with bound devices."""
        spec, device = launch.spec, allocation.devices[0].kind
        on = binding(allocation.devices, exclusive=True, shared=is_shared(allocation))
        terms = fleets.terms_of(spec, launch.max_model_len)
        fleet = fleets.fleet_key(terms)
        own = StoreAddress("file", str(Path(launch.store.folder).parent / f"rlhfless-fleet-{fleet}"))
        engine = EngineSettings.of(spec, on.kind, own, launch.max_model_len, launch.kv_bytes(device))
        return SharedSettings(
            run_id=f"fleet-{fleet}",
            lease=launch.lease,
            engine=replace(engine, seed=0),  # each request has its own
            binding=on,
            run_folder=str(launch.run_folder.absolute()),
            planned=launch.planned(kind, allocation),
            import_paths=import_paths(),
            fleet=fleet,
            terms=tuple(sorted(terms.items())),
            run=terms_of(launch),
        )

    async def __init__(self, settings: SharedSettings) -> None:  # type: ignore[misc]
        self._started_s = time.time()
        await EngineFunction.__init__(self, settings)  # type: ignore[misc]  # Serve awaits constructors
        # The engine has made a folder for a store of its own. Runs bring theirs, so it stays empty.
        shutil.rmtree(settings.engine.store.folder, ignore_errors=True)
        self._shared = settings
        self._members: dict[str, Member] = {}
        self._ends_s: dict[str, float] = {}
        """When the lease of each run ends, on the monotonic clock."""
        self._up_s = time.time()
        if self._unfit is not None:
            return
        engine = settings.engine.engine
        self._queue = FairQueue(engine.sequence_limit, self._engine.kv_capacity_tokens)
        self._watching = asyncio.create_task(self._watch())

    # -- runs that join and leave

    async def join(self, call: Call, terms: RunTerms) -> Reply[None]:
        """Let a run use the actor; its earlier requests and adapters are dropped. Raises StaleCall, FunctionBroken if
        the engine is dead, or the start's error."""
        start_s = time.time()
        if self._unfit is not None:
            raise self._unfit
        if not self._engine.usable:
            raise FunctionBroken("the engine is dead")
        known = self._members.get(call.run_id)
        if known is not None:
            self._refuse_stale(call, known)
            await self._drop(call.run_id)
        engine = MemberEngine(cast(SharedEngine, self._engine), self._queue, call.run_id, terms.store)
        self._members[call.run_id] = Member(engine, terms, call.attempt)
        self._renew(call.run_id)
        log.info("run %s joined; %d runs", call.run_id, len(self._members))
        return self.reply(None, start_s)

    async def stop(self, call: Call) -> Reply[SharedNow | None]:
        """Let the run leave, and return the state of the engine then. The actor stays; the last run to leave deletes
        it."""
        start_s = time.time()
        self.admit(call)
        with self.engine_faults("leaving"):
            await self._drop(call.run_id)
        return self.metered(self.reply(self._now(), start_s), call)

    async def _drop(self, run_id: str) -> None:
        """End a run's requests, and drop its adapters."""
        member = self._members.pop(run_id)
        self._ends_s.pop(run_id, None)
        await member.end_earlier(math.inf)
        with contextlib.suppress(EngineError):  # the next call of any run finds out
            await cast(MemberEngine, member.engine).leave()

    async def _watch(self) -> None:
        """Drop runs whose driver no longer renews their leases."""
        while True:
            await asyncio.sleep(LOOK_S)
            for run_id in [run_id for run_id, end_s in self._ends_s.items() if end_s < time.monotonic()]:
                log.warning("run %s has not renewed its lease, and is dropped", run_id)
                remove_cache(self._members[run_id].terms.store)
                await self._drop(run_id)

    def _renew(self, run_id: str) -> None:
        now_s = time.monotonic()
        self._ends_s[run_id] = now_s + self._members[run_id].terms.lease.renewed_s
        self._lease.renew(max(self._ends_s.values()) - now_s)

    # -- what differs from an actor of one run

    def _member(self, call: Call) -> Member:
        return self._members[call.run_id]

    def admit(self, call: Call) -> None:
        """Admit a call of a run that has joined. Raises StaleCall, the start's error, or FunctionBroken."""
        if self._unfit is not None:
            raise self._unfit
        member = self._members.get(call.run_id)
        if member is None:
            raise FunctionBroken(f"run {call.run_id} has not joined this engine, or its lease has ended")
        self._refuse_stale(call, member)
        member.attempt = call.attempt
        self._renew(call.run_id)

    @staticmethod
    def _refuse_stale(call: Call, member: Member) -> None:
        if call.attempt < member.attempt:
            raise StaleCall(
                f"call of attempt {call.attempt} of run {call.run_id}, but attempt {member.attempt} has taken over"
            )

    def metered_s(self, call: Call) -> float:
        return cast(SharedEngine, self._engine).shares.get(call.run_id, 0.0)

    async def renew(self, call: Call) -> Reply[SharedNow | None]:
        """Renew the run's lease, and return the state of the engine."""
        start_s = time.time()
        self.admit(call)
        return self.metered(self.reply(self._now(), start_s), call)

    def _now(self) -> SharedNow:
        from ray import serve  # takes seconds to import, and a driver that only makes calls does not need it

        settings, slots = self._shared, self._shared.engine.adapters
        return SharedNow(
            fleet=settings.fleet,
            engine=serve.get_replica_context().app_name,
            incarnation=self.incarnation,
            terms=dict(settings.terms),
            slots=0 if slots is None else slots.slots,
            started_s=self._started_s,
            up_s=self._up_s,
            now_s=time.time(),
            runs=self._runs(),
        )

    def _runs(self) -> Mapping[str, RunShare]:
        seconds = cast(SharedEngine, self._engine).shares
        return {
            run_id: RunShare(seconds.get(run_id, 0.0), *self._queue.counts(run_id), present=run_id in self._members)
            for run_id in dict.fromkeys((*seconds, *self._members))
        }

    @contextmanager
    def engine_faults(self, doing: str) -> Iterator[None]:
        """Convert engine failures to FunctionBroken, as for an actor of one run. A run's damaged file leaves the engine
        to the others."""
        try:
            with super().engine_faults(doing):
                try:
                    yield
                except WeightFileError as error:
                    raise FunctionBroken(f"{doing} failed: {error}") from error
        except KeyError as error:  # the run was dropped meanwhile
            raise FunctionBroken(f"the run has left during {doing}") from error

    def clean_up(self) -> None:
        """Delete the runs' caches of weights on this node."""
        for member in self._members.values():
            remove_cache(member.terms.store)
