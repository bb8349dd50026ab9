"""A policy's view of a simulation: the slots of a setup at the prices of a book, and the arrays of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache, partial

from rlhfless.records import FunctionRole
from rlhfless.scaling.policy import EngineLimits, FleetView, ReplicaSlot, SlotView, StepView, read_only
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook
from rlhfless.sim.fleet import SimulatedFleet
from rlhfless.sim.generation import Generation
from rlhfless.sim.setup import ActorShape, Setup, SlotSetup

slot_view = lru_cache(maxsize=1 << 16)(SlotView)
"""Many slots have equal views; a cached view is faster than a new one."""


def fleet_view(setup: Setup, prices: PriceBook) -> FleetView:
    """Return the view of a setup's slots. Raises PriceError for a device kind without a price.

    The price of a device is the saving of its release: for owned hardware the price that other users pay, and 0 for a
    device of the learner, which is never released, or of a node that is rented whole. Stragglers look like all others,
    and all actors are assumed to load their weights at once.
    """
    actors = setup.actors
    released = setup.learner.paid_around is not None
    never = () if released else (setup.learner.slot_setup,)
    kept = frozenset(device.name for slot_setup in never for device in slot_setup.allocation.devices)
    replica_slots = tuple(
        ReplicaSlot(
            function=setup.functions[slot],
            role=setup.roles[slot],
            kind=slot_setup.allocation.devices[0].kind,
            devices=tuple(device.name for device in slot_setup.allocation.devices),
            node=slot_setup.node,
            # A learner that gives its devices back is paid for by its work, whatever a policy does.
            usd_per_s=0.0
            if released and setup.roles[slot] is FunctionRole.UPDATES
            else _usd_per_s(slot_setup, prices, kept),
            start_s=slot_setup.start_s,
            engine=_engine_limits(actors[slot]) if setup.roles[slot] is FunctionRole.SAMPLES else None,
        )
        for slot, slot_setup in enumerate(setup.slot_setups)
    )
    links = setup.links
    transport, nodes = setup.transport, {actor.slot_setup.node for actor in actors}
    load_s = sum(map(transport.pulls, nodes)) * transport.pull_s + transport.load_s
    return FleetView(
        replica_slots,
        load_s,
        links.move_s,
        links.heartbeat_s,
        setup.max_tokens,
        kept_usd_per_s(setup.slot_setups, prices, kept),
        setup.terms,
    )


def with_waits(view: FleetView, fleet: SimulatedFleet, at_s: float) -> FleetView:
    """Return the view with the seconds until nodes that are being provisioned are ready.

    A live fleet shows them the same way at the start of a step.
    """
    waits_s = [fleet.reacquire_s(slot, at_s) for slot in range(len(view.replica_slots))]
    if not any(waits_s):
        return view
    slots = tuple(replace(slot, reacquire_s=wait_s) for slot, wait_s in zip(view.replica_slots, waits_s, strict=True))
    return replace(view, replica_slots=slots)


def kept_usd_per_s(slot_setups: Iterable[SlotSetup], prices: PriceBook, kept: Collection[str]) -> float:
    """Return US dollars per second while only the devices in `kept`, which are never given back, are held.

    Raises PriceError for a kind without a price.
    """
    devices = {device.name: device.kind for slot_setup in slot_setups for device in slot_setup.allocation.devices}
    usd_per_hour = (
        prices.device(kind).usd_per_hour if name in kept else prices.device(kind).released_usd_per_hour
        for name, kind in devices.items()
    )
    return math.fsum(usd_per_hour) / SECONDS_PER_HOUR


class Window:
    """Creates the views of a step for its policy.

    The arrays are the simulation's own; only the slots are new in each view.
    """

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
            group=read_only(batch.group),
            tokens=read_only(table.tokens),
            finished=read_only(table.finished),
            truncated=read_only(table.truncated),
            home=read_only(generation.assignment.home),
            prefixes=batch.tree.long() if fleet.setup.prefixes.planned else None,
        )

    def view(self) -> StepView:
        """Return a view of the step and the fleet now."""
        return self._view(slots=tuple(map(slot_view, self._fleet.states(), *self._generation.counts())))


def _usd_per_s(slot_setup: SlotSetup, prices: PriceBook, kept: Collection[str]) -> float:
    """Return the US dollars per second that the release of a slot's replica saves.

    A replica that runs next to others holds a share of its own, and can give it back on any device.
    """
    shared = [
        (held, share) for held, share in slot_setup.allocation.shared if slot_setup.beside or held.name not in kept
    ]
    return prices.usd_per_s(shared, "saved_usd_per_hour")


def _engine_limits(actor: ActorShape) -> EngineLimits:
    shape = actor.engine
    tokens = shape.kv_blocks * shape.block_tokens
    return EngineLimits(actor.prices.model, tokens, shape.max_sequences)
