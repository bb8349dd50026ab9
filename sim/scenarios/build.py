"""Build the inputs of the simulator from a scenario: price book, slots and workload.

Co-located, actor i has the devices i x tp ... of its node, and the learner all devices of the first kind; they take
turns. Disaggregated, the learner side has the last devices of the first kind. Scoring runs on CPU cores of its own.
"""

from __future__ import annotations

import math

from rlhfless.prefixes.packing import ON_CPUS, Packing
from rlhfless.prefixes.shared_forward import SharedForward
from rlhfless.records import FunctionName, Work
from rlhfless.scaling.latency.roofline import start_s
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.scaling.prices import (
    SECONDS_PER_HOUR,
    Billing,
    DevicePrice,
    Owned,
    PriceBook,
    RentalTerms,
    load_price_book,
)
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.scenarios import timing
from rlhfless.sim.scenarios.cluster import DevicesByNode, MachinesSpec
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.scenarios.work import (
    CriticTimingSpec,
    EpisodesWorkload,
    JudgeTimingSpec,
    ScenarioPlacementSpec,
    ScoringTimingSpec,
)
from rlhfless.sim.setup import ActorShape, LearnerShape, PrefixUse, ServiceShape, Setup, SlotSetup, Transport
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.learner import evaluated_share
from rlhfless.spec.rewards import JUDGE_PREFIX
from rlhfless.spec.teachers import FUNCTION_PREFIX


def price_book(scenario: Scenario) -> PriceBook:
    """Return the prices of the scenario's cluster. Raises InputError or PriceError for a kind without a price."""
    book = load_price_book(scenario.cluster.prices)
    tenures = {machines.kind: machines for machines in scenario.cluster.machines}
    own = [sheet for kind in tenures if kind not in book.kinds and (sheet := scenario.cluster.sheet(kind)).price]
    added = (DevicePrice(kind=sheet.kind, **dict(sheet.price or {})) for sheet in own)
    book = book.model_copy(update={"devices": (*book.devices, *added)})
    for kind in tenures:
        book.device(kind)
    devices = tuple(
        _priced(device, tenures[device.kind], scenario) if device.kind in tenures else device for device in book.devices
    )
    return book.model_copy(update={"devices": devices})


class ScenarioLayout:
    """Slots of one placement.

    The learner's side is on the first machines, generation on the first `devices` devices of the last machines, by
    default all. Raises InputError if the learner or an actor does not fit.
    """

    def __init__(self, scenario: Scenario, placement: ScenarioPlacementSpec, devices: int | None = None) -> None:
        self._scenario, self._measured = scenario, timing.measured_times(scenario)
        self._placement = placement
        first, last = scenario.cluster.machines[0], scenario.cluster.machines[-1]
        self.machines = scenario.cluster.machines
        self.devices = last.devices if devices is None else devices
        """Devices of the last machines."""
        self._generation = last, DevicesByNode.of(last, self.devices)
        self._first = DevicesByNode.of(first, first.devices if first is not last else self.devices)
        devices_of_first = self._first.all
        apart = placement.mode == "disaggregated"
        if scenario.cluster.serverless is not None and not apart:
            what = "co-located functions share devices, and serverless containers have their own"
            hint = "set placement.mode to disaggregated, also for each policy that is placed co-located by default"
            raise InputError(scenario.name, [Problem("placement.mode", what, hint)])
        if first is not last and (not apart or placement.learner_devices not in (None, first.devices)):
            what = f"generation is on {last.kind} and the learner on {first.kind}"
            hint = f"set mode to disaggregated, and learner_devices to {first.devices} or leave it out"
            raise InputError(scenario.name, [Problem("placement", what, hint)])
        self.learner_side = devices_of_first
        if apart and first is last:
            self.learner_side = devices_of_first[-(placement.learner_devices or -(-len(devices_of_first) // 2)) :]
        needed = timing.learner_devices_needed(scenario, first.kind)
        if len(self.learner_side) < needed:
            what = f"the learner has {len(self.learner_side)} x {first.kind}, and its state needs {needed}"
            hint = "give it more devices, or lower learner.state_bytes_per_parameter"
            raise timing.DoesNotFit(scenario.name, [Problem("placement", what, hint)])

    def actors(self) -> tuple[ActorShape, ...]:
        machines, devices = self._generation
        if self._placement.mode == "disaggregated":
            devices = devices.without(self.learner_side)
        shapes = self._of_kind(machines, devices)
        if not shapes:
            what = f"no node has {self._scenario.engine.devices} devices left for an actor"
            hint = "lower engine.tensor_parallel, or placement.learner_devices, or take more devices"
            raise timing.DoesNotFit(self._scenario.name, [Problem("engine.tensor_parallel", what, hint)])
        return tuple(shapes)

    def _of_kind(self, machines: MachinesSpec, devices: DevicesByNode) -> list[ActorShape]:
        engine = self._scenario.engine
        if not (each := list(devices.actors(engine.devices))):
            return []
        blocks = timing.kv_tokens(self._scenario, machines.kind) // engine.block_tokens
        workload = self._scenario.workload
        park_s = workload.park_s if isinstance(workload, EpisodesWorkload) else math.inf
        shape = EngineShape(engine.max_sequences, blocks, engine.block_tokens, engine.max_batch_tokens, park_s)
        prices = PricedModel(timing.engine_model(self._scenario, machines.kind), engine.max_sequences)
        model = timing.engine_shape(self._scenario)
        up_s = timing.start_s(self._scenario, self._measured, FunctionName.GENERATION, start_s(model))
        turns = timing.turns_of(self._scenario, self._measured, FunctionName.GENERATION, machines.kind, engine.devices)
        slow_from = machines.devices - int(machines.stragglers * machines.devices)
        return [
            ActorShape(
                SlotSetup(Allocation.of(held), node, up_s, turns.sleep_s, turns.wake_s),
                shape,
                prices,
                machines.straggler_slowdown if _number(held[-1]) >= slow_from else 1.0,
                _spot_mean_s(self._scenario, machines),
            )
            for node, held in each
        ]

    def learner(self) -> LearnerShape:
        """Return the learner's slot, on all devices of its side."""
        scenario, node, side = self._scenario, self._first.devices[0][0], tuple(self.learner_side)
        kind, count = side[0].kind, len(side)
        work = scenario.learner
        evaluated = evaluated_share(work.mini_batches, work.epochs, work.old_logprobs) + work.reference
        return LearnerShape(
            self._slot(FunctionName.LEARNER, node, side),
            scenario.learner.fixed_s + timing.passes_s(scenario, kind, evaluated),
            timing.forward_token_s(scenario, kind, count) * evaluated * scenario.learner.learned_share,
            timing.learn_token_s(scenario, kind, count),
            timing.publish_s(scenario, self._measured),
            scenario.learner.mini_batches * count,
            scenario.learner.epochs,
            paid_around=timing.paid_around(scenario, count),
        )

    def services(self) -> tuple[ServiceShape, ...]:
        """Return the slots of scoring, reference, teachers, judges, critic and environment, as far as there are any."""
        scoring = self._scenario.scoring
        shapes = [] if scoring is None else [self._scoring(scoring)]
        if self._scenario.reference is not None:
            shapes.append(self._frozen(FunctionName.REFERENCE, self._scenario.reference.devices))
        for teacher in self._scenario.teachers:
            sizes = None if teacher.model is None else teacher.model.shape
            shapes.append(self._frozen(f"{FUNCTION_PREFIX}{teacher.name}", teacher.devices, sizes))
        shapes += map(self._judge, self._scenario.judges)
        if self._scenario.critic is not None:
            shapes.append(self._critic(self._scenario.critic))
        if isinstance(workload := self._scenario.workload, EpisodesWorkload):
            sessions = tuple(Device(f"session-{i}", CPU_KIND, i) for i in range(workload.sessions))
            up_s = (scoring or ScoringTimingSpec()).start_s
            slot_setup = SlotSetup(Allocation.of(sessions), self._first.devices[0][0], up_s, beside=True)
            shapes.append(ServiceShape(slot_setup, FunctionName.ENVIRONMENT, None, 0.0, 0.0))
        return tuple(shapes)

    def _scoring(self, scoring: ScoringTimingSpec) -> ServiceShape:
        cores = tuple(Device(f"cpu-{i}", "cpu-core", i) for i in range(scoring.cores))
        up_s = timing.start_s(self._scenario, self._measured, FunctionName.SCORING, scoring.start_s)
        slot_setup = SlotSetup(Allocation.of(cores), self._first.devices[0][0], up_s, beside=True)
        group_s = scoring.sample_s * self._scenario.samples_per_prompt / scoring.cores
        return ServiceShape(slot_setup, FunctionName.SCORING, Work.SCORE, group_s, 0.0)

    def _frozen(self, function: str, devices: int | None, sizes: ModelShape | None = None) -> ServiceShape:
        """Return a frozen model that computes logprobs. `sizes`: its own; None: the policy's."""
        scenario, kind, side = self._scenario, self._scenario.cluster.machines[0].kind, self._side(devices)
        sizes = sizes or scenario.model.shape
        slot_setup = self._slot(function, self._first.devices[-1][0], side, sizes)
        token_s = timing.forward_token_s(scenario, kind, len(side), sizes)
        return ServiceShape(slot_setup, function, Work.LOGPROBS, 0.0, token_s)

    def _judge(self, judge: JudgeTimingSpec) -> ServiceShape:
        scenario, kind, side = self._scenario, self._scenario.cluster.machines[0].kind, self._side(judge.devices)
        sizes = scenario.model.shape if judge.model is None else judge.model.shape
        function = f"{JUDGE_PREFIX}{judge.name}"
        slot_setup = self._slot(function, self._first.devices[-1][0], side, sizes)
        read_s = timing.forward_token_s(scenario, kind, len(side), sizes)
        write_s = timing.answer_token_s(scenario, kind, len(side), sizes)
        group_s = scenario.samples_per_prompt * judge.answer_tokens * write_s
        return ServiceShape(slot_setup, function, Work.SCORE, group_s, read_s)

    def _critic(self, critic: CriticTimingSpec) -> ServiceShape:
        scenario, kind, side = self._scenario, self._scenario.cluster.machines[0].kind, self._side(critic.devices)
        return ServiceShape(
            self._slot(FunctionName.CRITIC, self._first.devices[-1][0], side),
            FunctionName.CRITIC,
            Work.LOGPROBS,
            0.0,
            timing.forward_token_s(scenario, kind, len(side)),
            scenario.learner.fixed_s,
            timing.learn_token_s(scenario, kind, len(side)),
            critic.epochs or scenario.learner.epochs,
        )

    def _side(self, count: int | None) -> tuple[Device, ...]:
        """Return the last `count` devices of the learner's side; None: all of them."""
        return tuple(self.learner_side[-(count or len(self.learner_side)) :])

    def _slot(self, function: str, node: str, side: tuple[Device, ...], frozen: ModelShape | None = None) -> SlotSetup:
        """Return the slot of a function on the learner's side, whose state moves to host memory and back.

        `frozen`: the sizes of a model that is not trained.
        """
        scenario, kind = self._scenario, side[0].kind
        up_s = timing.start_s(scenario, self._measured, function, start_s(frozen or scenario.model.shape))
        turns = timing.turns_of(scenario, self._measured, function, kind, len(side), frozen)
        return SlotSetup(Allocation.of(side), node, up_s, turns.sleep_s, turns.wake_s)

    def transport(self, *, fixed: bool) -> Transport:
        """Return the transport of the weights. `fixed`: no actor is ever released.

        Raises ValueError for a broadcast to actors that may be released.
        """
        spec, measured = self._scenario.transport, self._measured
        size = timing.version_bytes(self._scenario)
        if measured is not None:
            return Transport(spec.kind, math.inf, measured.load_weights_s, size)
        fixed_s = spec.fixed_s + self._scenario.engine.step_s
        rate = spec.device_bytes_per_s * self._scenario.engine.devices
        if spec.kind == "nccl":
            if not fixed:
                raise ValueError("transport.kind is nccl, by which only actors that are never released get weights")
            return Transport(spec.kind, rate, fixed_s, size)
        return Transport(spec.kind, rate, fixed_s, size, self.learner_side[0].node, spec.pull_bytes_per_s)


def setup(scenario: Scenario, layout: ScenarioLayout, seed: int, *, reserved: bool = False) -> Setup:
    """Return the setup of the simulator, without a policy. `reserved`: all devices are kept for the whole run.

    Raises InputError for a schedule that the placement forbids.
    """
    terms = RentalTerms() if reserved else lease_terms(scenario, layout)
    try:
        return Setup(
            layout.actors(),
            layout.services(),
            layout.learner(),
            layout.transport(fixed=reserved),
            scenario.heartbeat_s,
            scenario.schedule,
            scenario.cluster.provisioning_s,
            scenario.max_tokens,
            seed,
            terms,
            prefix_use(scenario),
        )
    except ValueError as error:
        key, hint = "schedule", "set placement.mode to `disaggregated`, or the schedule to `sync`"
        if scenario.transport.kind == "nccl":
            key, hint = "transport.kind", "take `auto`, or static policies alone with a learner on devices of its own"
        problem = Problem(key, str(error), hint)
        raise InputError(scenario.name, [problem]) from error


def prefix_use(scenario: Scenario) -> PrefixUse:
    if scenario.prefixes is None or scenario.prefixes.sharing == "engine":
        return PrefixUse()
    forward = None
    if scenario.prefixes.sharing == "plan_and_learner":
        on_cpu = scenario.cluster.machines[0].kind == CPU_KIND
        packing = ON_CPUS if on_cpu else Packing(math.inf, scenario.model.shape.token_keys)
        forward = SharedForward(scenario.learner.micro_batch_tokens, packing)
    return PrefixUse(planned=bool(scenario.prefixes.levels), forward=forward)


def lease_terms(scenario: Scenario, layout: ScenarioLayout) -> RentalTerms:
    book = price_book(scenario)
    billings = [book.device(machines.kind).billing for machines in layout.machines]
    return RentalTerms.of(billings, scenario.cluster.reacquire_s)


def _priced(device: DevicePrice, machines: MachinesSpec, scenario: Scenario) -> DevicePrice:
    changes: dict[str, object] = {"rented_by": machines.rented_by or device.rented_by}
    if (seller := scenario.cluster.serverless) is not None:
        usd_per_hour = seller.premium * device.usd_per_hour
        return device.model_copy(update={"rented_by": "device", "usd_per_hour": usd_per_hour, "billing": None})
    terms = scenario.cluster.billing
    if terms is not None:
        changes["billing"] = Billing(**terms.model_dump(), source="cluster.billing", as_of=device.as_of)
    if machines.tenure == "owned":
        changes |= {"owned": Owned(released_value=machines.released_value or 0.0), "spot": None, "billing": None}
    if machines.tenure == "spot":
        if device.spot is None:
            problem = Problem("cluster.machines", f"{device.kind} has no spot price", "add `spot` to the price book")
            raise InputError(scenario.name, [problem])
        changes["usd_per_hour"] = device.spot.usd_per_hour
    return device.model_copy(update=changes)


def _spot_mean_s(scenario: Scenario, machines: MachinesSpec) -> float:
    """Return the mean life of an actor in seconds: each of its devices is interrupted at the book's rate."""
    if machines.tenure != "spot":
        return math.inf
    spot = load_price_book(scenario.cluster.prices).device(machines.kind).spot
    rate = spot.interruptions_per_hour * scenario.engine.devices if spot is not None else 0.0
    return SECONDS_PER_HOUR / rate if rate else math.inf


def _number(device: Device) -> int:
    return int(device.name.rpartition("-")[2])
