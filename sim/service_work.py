"""Run the stages after generation: services work on complete groups, then the learner on the step.

A service's running replica takes all complete groups, first come, first served. Its work is therefore computed only
when the result matters: at the end of the step's generation, before the replica's release, or when the replica starts
later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlhfless.prefixes.shared_forward import SharedForward, saved_tokens
from rlhfless.records import FunctionName, StepRecord, Work
from rlhfless.records.ledger import PREFIX_TOKENS_EVICTED, PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.scaling.accounting import Interval
from rlhfless.sim.generation import Generation
from rlhfless.sim.kernel import JOIN_S
from rlhfless.sim.kernel_state import Flags, Floats, Ints
from rlhfless.sim.ledger import SimulatedReplica
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import LearnerShape, ServiceShape
from rlhfless.sim.view import Window


@dataclass
class StepUnderWay:
    """A step, from its start until its weights are published."""

    number: int
    generation: Generation
    window: Window
    begun_s: float
    taken: dict[int, Flags]
    """`[groups]`, by the slot of a service: the groups that it has taken."""
    generated_s: float | None = None
    ready_s: float | None = None
    """When all services had finished the step, including the updates of services that learn."""
    updating: set[int] = field(default_factory=set)
    """Slots of services whose update of the step is in progress."""
    updated: set[int] = field(default_factory=set)
    """Slots of services whose update of the step has ended."""
    learning: bool = False
    done_s: dict[int, float] = field(default_factory=dict)
    """By slot of a service: when the work on all groups that it has taken ends."""
    foreseen: set[int] = field(default_factory=set)
    """Slots of services that have taken all groups."""
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that services and the learner computed, by function."""
    passes: Mapping[str, int] = field(default_factory=dict)
    """By function that learns: how many times it passes over the step's prompts, if not once."""
    served: set[int] = field(default_factory=set)
    """Slots of services that have finished all groups of the step."""

    def wants(self, slot: int) -> bool:
        """Return whether there are complete groups that the service at a slot has not taken."""
        return self.generation.progress.complete_groups > int(np.count_nonzero(self.taken[slot]))

    def first_s(self, slot: int) -> float:
        """Return when the first complete group that the service at a slot has not taken became complete."""
        progress = self.generation.progress
        complete = progress.complete
        return float(progress.complete_s[complete[~self.taken[slot][complete]]].min())

    def foresee(self, slot: int) -> bool:
        """Return whether a service has taken all groups of the step; True only the first time."""
        if slot in self.foreseen or not (self.taken[slot] | self.generation.progress.left_out).all():
            return False
        self.foreseen.add(slot)
        return True

    def computed_prompts(self, function: str, groups: Ints, saved: int) -> None:
        """Count the prompts of these groups as computed by a function, once per sample, less `saved` tokens."""
        batch = self.generation.progress.whole
        tokens = int((batch.prompt_tokens[groups] * np.bincount(batch.group)[groups]).sum()) - saved
        self.prompt_tokens[function] = self.prompt_tokens.get(function, 0) + tokens

    def record(self, end_s: float) -> StepRecord:
        """Return the record of a step that has ended."""
        progress, generated_s = self.generation.progress, self.generated_s or end_s
        batch, learned = progress.whole, progress.learned
        unique = float(batch.tree.unique_tokens(batch.prompt_tokens))
        computed = {FunctionName.GENERATION: self.generation.computed_tokens, **self.prompt_tokens}
        metrics = {
            **{f"{PROMPT_TOKENS_COMPUTED}/{function}": float(tokens) for function, tokens in computed.items()},
            **{f"{PROMPT_TOKENS_UNIQUE}/{function}": unique * self.passes.get(function, 1) for function in computed},
            PREFIX_TOKENS_EVICTED: float(self.generation.evicted_tokens),
            "generation_s": generated_s - self.begun_s,
            "response_tokens": float(batch.response_tokens[learned].sum()),
            "responses": float(np.count_nonzero(learned)),
        }
        return StepRecord(batch.step, self.begun_s, end_s, metrics)


def take(
    shape: ServiceShape,
    slot: int,
    replica: SimulatedReplica,
    under_way: StepUnderWay,
    forward: SharedForward | None = None,
) -> None:
    """Run a service on all complete groups of a step that it has not taken yet. `forward`: see PrefixUse."""
    progress, taken = under_way.generation.progress, under_way.taken[slot]
    groups = progress.complete[~taken[progress.complete]]
    if not len(groups):
        return
    batch, complete_s = progress.whole, progress.complete_s
    groups = groups[np.argsort(complete_s[groups], kind="stable")]
    fed = np.bincount(batch.group, batch.prompt_tokens[batch.group] + batch.response_tokens, minlength=batch.groups)
    tokens = fed[groups].astype(np.float64)
    arrival_s = np.maximum(complete_s[groups], replica.busy_s)
    if shape.work is Work.LOGPROBS and forward is not None:
        _pass_together(shape, replica, under_way, groups, arrival_s, tokens, forward)
    else:
        service_s: Floats = shape.group_s + shape.token_s * tokens
        for start_s, end_s in first_come_first_served(arrival_s, service_s):
            replica.called(shape.work, batch.step, start_s, end_s)
            replica.busy_s = end_s
        if shape.work is Work.LOGPROBS:
            under_way.computed_prompts(shape.function, groups, 0)
    taken[groups] = True
    under_way.done_s[slot] = replica.busy_s


def _pass_together(
    shape: ServiceShape,
    replica: SimulatedReplica,
    under_way: StepUnderWay,
    groups: Ints,
    arrival_s: Floats,
    tokens: Floats,
    forward: SharedForward,
) -> None:
    """Run a service on all waiting groups in one call, computing shared prefixes once."""
    batch, first, count = under_way.generation.progress.whole, 0, len(groups)
    while first < count:
        start_s = max(replica.busy_s, float(arrival_s[first]))
        last = int(np.searchsorted(arrival_s, start_s + JOIN_S, side="right"))
        saved = shared_forward(batch, groups[first:last], forward)
        spent_s = shape.group_s * (last - first) + shape.token_s * (float(tokens[first:last].sum()) - saved)
        fed = {"input_tokens": int(tokens[first:last].sum()), "cached_tokens": saved}
        replica.called(shape.work, batch.step, start_s, start_s + spent_s, **fed)
        replica.busy_s = start_s + spent_s
        under_way.computed_prompts(shape.function, groups[first:last], saved)
        first = last


def shared_forward(batch: RolloutBatch, groups: Ints, forward: SharedForward) -> int:
    """Return the tokens that one forward pass over these groups saves by computing shared prefixes once."""
    in_groups = np.isin(batch.group, groups)
    return saved_tokens(
        batch.tree, batch.prompt_tokens, batch.group[in_groups], batch.response_tokens[in_groups], forward
    )


def update(
    shape: ServiceShape,
    replica: SimulatedReplica,
    under_way: StepUnderWay,
    at_s: float,
    parts: int,
    forward: SharedForward | None = None,
) -> None:
    """Update a service on the step from `at_s` on, in `parts` that forward shared prefixes separately."""
    fed, saved = _computed(shape.function, under_way, parts, forward, shape.epochs)
    spent_s = shape.update_fixed_s + shape.update_token_s * (fed - saved)
    step, read = under_way.generation.progress.batch.step, {"input_tokens": fed, "cached_tokens": saved}
    replica.called(Work.LEARN, step, at_s, at_s + spent_s, **read)
    replica.busy_s = at_s + spent_s


def _computed(
    function: str, under_way: StepUnderWay, parts: int, forward: SharedForward | None, epochs: int
) -> tuple[int, int]:
    """Return the input tokens of an update in all passes, and how many of them it does not compute."""
    progress = under_way.generation.progress
    batch, groups, learned = progress.whole, np.flatnonzero(~progress.left_out), progress.learned
    fed = int(batch.prompt_tokens[batch.group[learned]].sum() + batch.response_tokens[learned].sum())
    cuts = () if forward is None else np.array_split(groups, min(parts, len(groups)))
    saved = sum(shared_forward(batch, part, forward) for part in cuts if forward)
    for _ in range(epochs):
        under_way.computed_prompts(function, groups, saved)
    return epochs * fed, epochs * saved


def learn(
    shape: LearnerShape,
    replica: SimulatedReplica,
    under_way: StepUnderWay,
    at_s: float,
    forward: SharedForward | None = None,
) -> None:
    """Evaluate, learn and publish from `at_s` on. `forward`: see PrefixUse."""
    batch = under_way.generation.progress.batch
    fed, saved = _computed(FunctionName.LEARNER, under_way, shape.parts, forward, shape.epochs)
    tokens = fed - saved
    now_s = at_s
    for work, spent_s in (
        (Work.EVALUATE, shape.evaluate_token_s * tokens / shape.epochs),
        (Work.LEARN, shape.fixed_s + shape.learn_token_s * tokens),
        (Work.PUBLISH, shape.publish_s),
    ):
        if spent_s > 0:
            read = {} if work is Work.PUBLISH else {"input_tokens": fed, "cached_tokens": saved}
            replica.called(work, batch.step, now_s, now_s + spent_s, **read)
        now_s += spent_s
    replica.busy_s = now_s


def first_come_first_served(arrival_s: Floats, service_s: Floats) -> list[Interval]:
    """Return the spans in which one server works. Jobs within JOIN_S of each other share a span.

    `arrival_s` ascends. The end of job i is the largest, over j <= i, of arrival j plus all service from j to i.
    """
    before_s = np.cumsum(service_s) - service_s
    start_s = np.maximum.accumulate(arrival_s - before_s) + before_s
    end_s = start_s + service_s
    opens = np.concatenate([[True], arrival_s[1:] > end_s[:-1] + JOIN_S])
    closes = np.concatenate([opens[1:], [True]])
    return list(zip(start_s[opens].tolist(), end_s[closes].tolist(), strict=True))
