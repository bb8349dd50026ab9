"""A policy's view of a simulation: the slots of a setup at the prices of a book, and the arrays of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial

from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.policy import EngineLimits, FleetView, ReplicaSlot, SlotView, StepView, read_only
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook
from rlhfless.sim.fleet import SimulatedFleet
from rlhfless.sim.generation import Generation
from rlhfless.sim.setup import ActorShape, Setup, SlotSetup

slot_view = lru_cache(maxsize=1 << 16)(SlotView)
"""Many slots have equal views; a cached view is faster than a new one."""


def fleet_view(setup: Setup, prices: PriceBook) -> FleetView:
    """The slots of a setup, by slot. Raises PriceError for a device kind without a price.

    The price of a device is the saving of its release: for owned hardware the price that other users pay. The price of
    sleep is the book's residency; if there is none, the price of the device, unless another replica is awake on it.
    Stragglers look like all others, and all actors are assumed to load their weights at once.
    """
    actors = setup.actors
    replica_slots = tuple(
        ReplicaSlot(
            function=setup.functions[slot],
            role=setup.roles[slot],
            kind=slot_setup.allocation.devices[0].kind,
            devices=tuple(device.name for device in slot_setup.allocation.devices),
            node=slot_setup.node,
            usd_per_s=_usd_per_s(slot_setup.allocation, prices, asleep=False),
            start_s=slot_setup.start_s,
            wake_s=slot_setup.wake_s,
            resident_usd_per_s=dict.fromkeys(slot_setup.wake_s, _usd_per_s(slot_setup.allocation, prices, asleep=True)),
            engine=_engine_limits(actors[slot]) if slot < len(actors) else None,
            beside=slot_setup.beside,
        )
        for slot, slot_setup in enumerate(setup.slot_setups)
    )
    links = setup.links
    load_s = setup.transport.load_s(len(actors))
    return FleetView(
        replica_slots,
        load_s,
        links.move_s,
        links.kv_token_s,
        links.beat_s,
        setup.max_tokens,
        kept_usd_per_s(setup.slot_setups, prices),
        setup.terms,
        links.kv_token_s,
    )


def with_waits(view: FleetView, fleet: SimulatedFleet, at_s: float) -> FleetView:
    """The view with the waits for nodes that are not there yet, as a live fleet shows them when a step begins."""
    waits_s = [fleet.reacquire_s(slot, at_s) for slot in range(len(view.replica_slots))]
    if not any(waits_s):
        return view
    slots = tuple(replace(slot, reacquire_s=wait_s) for slot, wait_s in zip(view.replica_slots, waits_s, strict=True))
    return replace(view, replica_slots=slots)


def kept_usd_per_s(slot_setups: Iterable[SlotSetup], prices: PriceBook) -> float:
    """Cost of a second in which none of the slots' devices is held. Raises PriceError for a kind without a price."""
    devices = {device.name: device.kind for slot_setup in slot_setups for device in slot_setup.allocation.devices}
    return math.fsum(prices.device(kind).released_usd_per_hour for kind in devices.values()) / SECONDS_PER_HOUR


class Window:
    """A step as a policy sees it. Its arrays are the simulation's own; only the slots are new for each view."""

    def __init__(self, fleet_view: FleetView, fleet: SimulatedFleet, generation: Generation) -> None:
        batch, table = generation.progress.batch, generation.progress.table
        self._fleet = fleet
        self._generation = generation
        self._view = partial(
            StepView,
            fleet=fleet_view,
            step=batch.step,
            prompt_ids=batch.prompt_ids,
            prompt_tokens=read_only(batch.prompt_tokens),
            group=read_only(table.group),
            tokens=read_only(table.tokens),
            finished=read_only(table.finished),
            truncated=read_only(table.truncated),
            home=read_only(generation.assignment.home),
            prefixes=batch.tree.long() if fleet.setup.prefixes.planned else None,
        )

    def look(self) -> StepView:
        """The step and the fleet now."""
        return self._view(slots=self._slots())

    def _slots(self) -> tuple[SlotView, ...]:
        return tuple(map(slot_view, *self._fleet.standing(), *self._generation.counts()))


def _usd_per_s(allocation: Allocation, prices: PriceBook, *, asleep: bool) -> float:
    total = 0.0
    for held, share in allocation.shared:
        device = prices.device(held.kind)
        if asleep and device.residency is not None:
            total += share * device.residency.usd_per_hour
        else:
            total += share * device.saved_usd_per_hour
    return total / SECONDS_PER_HOUR


def _engine_limits(actor: ActorShape) -> EngineLimits:
    shape = actor.engine
    tokens = shape.kv_blocks * shape.block_tokens
    return EngineLimits(actor.prices.model, tokens, shape.max_sequences, shape.prefill_only)
