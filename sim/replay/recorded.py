"""Set up the simulator as a recorded run: its actors on their devices, with fitted latencies. Pure.

KV memory has the size that the engines reported; without a report it is assumed to suffice. No actor is interrupted. A
replay omits the start of the fleet and the replacement of lost replicas; a replica that another policy releases and
starts again takes as long to start as the run's own replicas.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import TypeAdapter

from rlhfless.prefixes.packing import ALWAYS, ON_CPUS
from rlhfless.prefixes.shared_forward import SharedForward
from rlhfless.prefixes.tree import BLOCK_TOKENS, CPU_BLOCK_TOKENS
from rlhfless.records import FunctionName, WeightVersion, Work
from rlhfless.records.ledger import PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.placement import CPU_KIND, Allocation
from rlhfless.scaling.policy import Action, Assign, Event, Start, StepBegan, StepView
from rlhfless.sim.counted_prompts import AGAIN, CountedPrompt, batch_of
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.replay.calibrate import device_kind, max_sequences
from rlhfless.sim.replay.fleet import RecordedFleet, epochs_of, learner_of, slot_setup_of, start_s_of
from rlhfless.sim.replay.latency_file import LatencyFile, LineFit
from rlhfless.sim.replay.what_if import OtherDevices, kv_tokens
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import ActorShape, PrefixUse, ServiceShape, Setup, Transport
from rlhfless.spec import AsyncSpec, LearnerSpec, PartialSpec, ScheduleSpec, SyncSpec
from rlhfless.spec.generation import USUAL_BATCH_TOKENS

FORWARD_TOKENS = LearnerSpec().pass_tokens
"""Tokens of a forward pass if the spec of a trace does not have them."""

NEARLY = 0.9
"""Share of the savable prompt tokens that counts as all of them: a prefix is computed once in each micro-batch that has
it, so some are computed again."""

AS_IT_WAS = OtherDevices()

BUILT_IN = frozenset({"sync", "partial", "one_step_off", "async"})


def setup_of(trace: Trace, latency: LatencyFile, other: OtherDevices = AS_IT_WAS) -> Setup:
    """Return the setup of the run's fleet, or of a fleet on other devices.

    `latency` must be fitted to the kind of those devices. Raises TraceError if the trace lacks a part of the fleet.
    """
    fleet, kind = RecordedFleet(trace), device_kind(trace)

    def allocation(function: str) -> Allocation:
        return other.allocation(fleet.allocation(function), kind)

    def service(function: str, work: Work | None, line: LineFit) -> ServiceShape:
        slot_setup = slot_setup_of(allocation(function), start_s_of(trace, function))
        learned = latency.updates.get(function, LineFit(fixed_s=0.0))
        update = (learned.fixed_s, learned.token_s, epochs_of(trace, function))
        return ServiceShape(slot_setup, function, work, line.fixed_s, line.token_s, *update)

    services = []
    rewarded = bool(trace.meta.spec.get("rewards", True))
    if fleet.lives(FunctionName.SCORING) or (rewarded and not fleet.lives(FunctionName.ENVIRONMENT)):
        services.append(service(FunctionName.SCORING, Work.SCORE, LineFit(fixed_s=latency.group_s)))
    if fleet.lives(FunctionName.ENVIRONMENT):
        services.append(service(FunctionName.ENVIRONMENT, None, LineFit(fixed_s=0.0)))
    services += [service(name, Work.LOGPROBS, line) for name, line in latency.columns.items()]
    shape, start_s = (
        _engine_shape(trace, kv_tokens(trace, kind, other.kind or kind)),
        start_s_of(trace, FunctionName.GENERATION),
    )
    bounds = trace.meta.spec.get("scaling", {}).get("generation", {})
    fewest = int(bounds.get("min_actors", 0))
    most = bounds["max_actors"] if isinstance(bounds.get("max_actors"), int) else 0
    prices = PricedModel(latency.engine, shape.max_sequences)
    draw = other.allocations(fleet.actors, kind, most)
    return Setup(
        tuple(ActorShape(slot_setup_of(held, start_s), shape, prices) for held in draw),
        tuple(services),
        learner_of(trace, latency, allocation(FunctionName.LEARNER)),
        Transport("auto", 1.0, latency.load_weights_s, 0),
        float(trace.meta.spec["generation"].get("progress_interval_s", 0.5)),
        recorded_schedule(trace) if other.max_staleness is None else steps_ahead(other.max_staleness),
        0.0,
        int(trace.meta.spec["generation"].get("max_tokens", 0)) or max(row.response_tokens for row in trace.rollouts),
        0,
        prefixes=_prefix_use(trace),
        warm=True,
        fewest_actors=len(draw) if 0 < fewest == most else fewest,
    )


def steps_drawn(setup: Setup, trace: Trace, batches: Sequence[RolloutBatch]) -> Sequence[RolloutBatch]:
    """Return the batches of the simulated steps, from those that the run's steps learned from.

    Steps that defer groups start them as in the run, which started a group with the weights of its first token. Prompts
    then share no prefixes: the trace does not show which prefixes deferred groups share.
    """
    if not isinstance(setup.schedule, PartialSpec):
        return batches
    begun: dict[tuple[int, str], int] = {}
    for row in trace.rollouts:
        key = row.step, row.prompt_id
        drawn = [WeightVersion.parse(span.version).step + 1 for span in row.version_spans[:1]]
        begun[key] = min([begun.get(key, row.step), *drawn])
    return as_begun(batches, begun)


def as_begun(learned: Sequence[RolloutBatch], begun: Mapping[tuple[int, str], int]) -> list[RolloutBatch]:
    """Return the batches of the steps of a run of which only the learned groups are known.

    They have these groups in the order of their starts. `begun`: the steps that started them, by step and prompt.
    """
    groups = [
        (begun.get((batch.step, batch.prompt_ids[prompt.number]), batch.step), prompt)
        for batch in learned
        for prompt in CountedPrompt.all_of(batch)
    ]
    sequence = [prompt for _, prompt in sorted(groups, key=lambda pair: pair[0])]
    ends = np.cumsum([batch.groups for batch in learned]).tolist()
    return [batch_of(batch.step, sequence[end - batch.groups : end]) for batch, end in zip(learned, ends, strict=True)]


def recorded_schedule(trace: Trace) -> ScheduleSpec:
    """Return the schedule of a run; a user's own counts as `sync`."""
    written = trace.meta.spec.get("schedule") or {}
    if written.get("type", "sync") not in BUILT_IN:
        return SyncSpec()
    schedule: ScheduleSpec = TypeAdapter(ScheduleSpec).validate_python(written or {"type": "sync"})
    return schedule


def steps_ahead(count: int) -> ScheduleSpec:
    """Return the schedule that generates this many steps ahead of the learner, and loads weights between them."""
    return AsyncSpec(max_staleness=count, in_flight=False) if count else SyncSpec()


def _prefix_use(trace: Trace) -> PrefixUse:
    """Return the run's use of prefixes: planned, and shared by reference and learner if its spec says so."""
    learner = trace.meta.spec.get("learner") or {}
    if not learner.get("share_prefixes", True):
        return PrefixUse(planned=True)
    packing = ON_CPUS if device_kind(trace) == CPU_KIND and not _packed_all(trace) else ALWAYS
    given = learner.get("micro_batch_tokens", "auto")
    budget_tokens = FORWARD_TOKENS if given == "auto" else int(given)
    return PrefixUse(planned=True, forward=SharedForward(budget_tokens, packing))


def _packed_all(trace: Trace) -> bool:
    """Return whether the learner computed nearly every shared prompt token once.

    The learner compares tokens, and a trace has only lengths: common beginnings of sibling responses can make packing
    pay where lengths suggest that it does not.
    """
    saved = sum(
        call.cached_tokens
        for call in trace.invocations
        if call.work is Work.LEARN and call.function == FunctionName.LEARNER
    )
    counted = f"{PROMPT_TOKENS_COMPUTED}/{FunctionName.LEARNER}", f"{PROMPT_TOKENS_UNIQUE}/{FunctionName.LEARNER}"
    computed, unique = (sum(step.metrics.get(name, 0.0) for step in trace.steps) for name in counted)
    shared = computed + saved - unique
    return shared > 0 and saved >= NEARLY * shared


class AsRecorded:
    """The policy of the run, as shown by the trace: every sample goes to the actor that finished it."""

    def __init__(self, trace: Trace) -> None:
        self._fleet = RecordedFleet(trace)
        self._rows: dict[str, dict[int, list[TracedRollout]]] = defaultdict(lambda: defaultdict(list))
        """By prompt and the step that learned from it."""
        for row in sorted(trace.rollouts, key=lambda row: (row.step, row.sample_index)):
            self._rows[row.prompt_id][row.step].append(row)

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:  # noqa: ARG002
        if not isinstance(event, StepBegan):
            return []
        unused = view.fleet.generation()[len(self._fleet.actors) :]
        absent = [slot for slot, slot_view in enumerate(view.slots) if slot_view.state is None and slot not in unused]
        return [*(Start(slot) for slot in absent), *self._assigned(view)]

    def _assigned(self, view: StepView) -> list[Action]:
        first = np.searchsorted(view.group, np.arange(len(view.prompt_ids))).tolist()
        begun: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for sample, group in enumerate(view.group.tolist()):
            row = self._siblings(view.step, view.prompt_ids[group])[sample - first[group]]
            begun[self._fleet.slot_of(row.actor, row.finished_s)].append((row.started_s, sample))
        return [
            Assign(slot, np.array([sample for _, sample in sorted(of)], dtype=np.int64))
            for slot, of in sorted(begun.items())
        ]

    def _siblings(self, step: int, prompt_id: str) -> list[TracedRollout]:
        """Return the group that is generated in a step; a later step may learn from it."""
        steps = self._rows[prompt_id if prompt_id in self._rows else prompt_id.rstrip(AGAIN)]
        return steps[next((learned for learned in steps if learned >= step), max(steps))]


def _engine_shape(trace: Trace, kv_tokens: int | None) -> EngineShape:
    sequences = max_sequences(trace)
    longest = max(row.prompt_tokens + row.response_tokens for each in trace.rollouts for row in each.requests)
    block = CPU_BLOCK_TOKENS if device_kind(trace) == CPU_KIND else BLOCK_TOKENS
    blocks = sequences * (longest // block + 1) if kv_tokens is None else kv_tokens // block
    tokens = trace.meta.spec["generation"]["engine"].get("max_batch_tokens", sequences)
    park_s = (trace.meta.spec.get("environment") or {}).get("park_s", math.inf)  # a run of an older version parks none
    budget = max(USUAL_BATCH_TOKENS if tokens == "auto" else int(tokens), sequences)
    return EngineShape(sequences, blocks, block, budget, float(park_s))
