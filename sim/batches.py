"""The batches of a simulated run: its groups and tokens, counted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from rlhfless.orchestrator.ledger import Ledger, StepAttempt
from rlhfless.orchestrator.step_metrics import TokenCounts, prompt_token_metrics
from rlhfless.records import Experience, FunctionName, Invocation
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.sim.counted import CountedGroup
from rlhfless.sim.setup import Setup


@dataclass(slots=True)
class CountedBatch:
    """What the trained functions of a step get."""

    tokens: int
    denominators: SimpleNamespace
    batch: Any
    groups: list[int]


@dataclass
class CountedStepBatch:
    """What a step learns from (implements rlhfless.orchestrator.batches.StepBatch)."""

    packed: CountedBatch
    groups: Sequence[CountedGroup]
    begun: StepAttempt
    epochs_of: Callable[[str], int]

    response_tokens: Sequence[float] = ()
    """Its trace has the lengths."""

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """See StepBatch. Generation ends with the last sample of the step, whatever its actors still do."""
        lengths = [group.prompt.response_tokens for group in self.groups]
        return {
            "generation_s": max(group.complete_s for group in self.groups) - self.begun.start_s,
            "response_tokens": float(sum(int(each.sum()) for each in lengths)),
            "responses": float(sum(map(len, lengths))),
        }

    def rollout_metrics(self, prompts: int) -> dict[str, float]:  # noqa: ARG002
        """See StepBatch. Counted samples have no rewards."""
        return {}

    def prompt_metrics(self, calls: Iterable[Invocation]) -> dict[str, float]:
        """See StepBatch."""
        batch, learned = self.packed.batch, self.packed.groups
        unique = batch.tree.unique_tokens(batch.prompt_tokens)
        if len(learned) < batch.groups:  # prompts of several steps share no prefixes (CountedPrompts)
            unique = int(batch.prompt_tokens[learned].sum())
        tokens = TokenCounts(unique, int(self.metrics["response_tokens"]))
        return prompt_token_metrics(calls, tokens, tokens, self.epochs_of)


class CountedBatches:
    """Counts the batches of a simulated run (implements rlhfless.orchestrator.batches.Batches)."""

    def __init__(self, setup: Setup) -> None:
        self._evaluates = setup.learner.evaluate_token_s > 0
        """Whether the learner computes the old logprobs before its first update."""
        self._epochs = {shape.function: shape.epochs for shape in setup.services if shape.learns}
        self._epochs[FunctionName.LEARNER] = setup.learner.epochs

    def key(self, group: Any) -> Hashable:
        """See Batches."""
        number: int = group.number
        return number

    def described(self, experience: Experience) -> str:
        """See Batches."""
        groups: Sequence[Any] = experience.groups
        return f"{len(groups)} groups, {sum(group.tokens for group in groups)} tokens with those of prompts"

    def added_up(self, groups: Sequence[Any], scored: Any) -> Sequence[Any]:  # noqa: ARG002
        """See Batches. Counted samples have no scores."""
        return groups

    def read_by(self, kind: FunctionSpec, group: Any) -> Any:  # noqa: ARG002
        """See Batches. Counted prompts have no sets, so that every function computes its output for all."""
        return group

    def to_compute(self, groups: Sequence[Any]) -> Sequence[Any]:
        """See Batches."""
        return groups

    def by_group(self, batch: Any, values: Any, groups: Sequence[Any]) -> Sequence[list[Any]]:  # noqa: ARG002
        """See Batches."""
        return [[] for _ in groups]

    async def learned_from(
        self,
        begun: StepAttempt,
        experience: Experience,
        learner: Any,  # noqa: ARG002
        evaluate: Any,
    ) -> CountedStepBatch:
        """See Batches."""
        groups: Sequence[Any] = experience.groups
        count, tokens = SimpleNamespace(groups=len(groups)), sum(group.tokens for group in groups)
        packed = CountedBatch(tokens, count, groups[0].batch, [group.number for group in groups])
        if self._evaluates:
            await evaluate(packed)
        return CountedStepBatch(packed, groups, begun, self._epochs.__getitem__)

    def learned(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """See Batches."""
        return dict(metrics)

    def record(self, ledger: Ledger, step: int, experience: Experience) -> None:  # noqa: ARG002
        """See Batches. The trace of a simulation has no rollouts."""
        ledger.add_rollouts(step, ())

    def kl_coefficient_after(self, step: int) -> float | None:  # noqa: ARG002
        """See Batches."""
        return None

    def restore(self, step: int, kl_coefficient: float | None) -> None:
        """See Batches."""
