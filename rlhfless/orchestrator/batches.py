"""The batches of a run: what its functions compute on and learn from, made of the groups of its steps.

A live run packs tokens (rlhfless.orchestrator.token_batches). A simulated run counts them (rlhfless.sim.batches).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from rlhfless.orchestrator.group_pipeline import ScoredGroups
from rlhfless.orchestrator.ledger import Ledger, StepAttempt
from rlhfless.records import Experience, FloatArray, Group, Invocation, WeightVersion
from rlhfless.scaling.function_specs import FunctionSpec

Evaluate = Callable[[Any], Awaitable[FloatArray]]
"""Computes the old logprobs of a batch, `[tokens]`."""


class StepBatch(Protocol):
    """What a step learns from: its usable samples, with the targets of policy and critic."""

    @property
    def packed(self) -> Any:
        """The batch that the trained functions get. `packed.denominators.groups` is its number of groups."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the batch itself."""

    @property
    def response_tokens(self) -> Sequence[float]:
        """The response length of each generated sample."""

    def rollout_metrics(self, prompts: int) -> dict[str, float]:
        """Return the metrics of the generated samples. `prompts`: the number of groups wanted."""

    def prompt_metrics(self, calls: Iterable[Invocation]) -> dict[str, float]:
        """Return the metrics of the prompt tokens that these calls of the step have computed."""


class Batches(Protocol):
    """Makes the batches of a run."""

    def key(self, group: Group) -> Hashable:
        """Identify a group by its prompt and the lengths of its samples."""

    def described(self, experience: Experience) -> str:
        """Return the numbers of groups, samples and tokens, for the log."""

    def added_up(self, groups: Sequence[Group], scored: Sequence[ScoredGroups]) -> ScoredGroups:
        """Add up the scores of several functions per sample. Raises RewardError."""

    def read_by(self, kind: FunctionSpec, group: Group) -> Group | None:
        """Return the group as a function reads it; None if the function computes nothing for its prompt."""

    def to_compute(self, groups: Sequence[Group]) -> Any:
        """Return the batch of groups that a function computes per-token outputs of."""

    def by_group(self, batch: Any, values: Any, groups: Sequence[Group]) -> Sequence[list[FloatArray]]:
        """Split the outputs of `to_compute(groups)` by group and sample."""

    async def learned_from(
        self, begun: StepAttempt, experience: Experience, learner: WeightVersion, evaluate: Evaluate
    ) -> StepBatch:
        """Make the batch of a step: drop failures, and add targets. `learner`: the version of the learner's weights.

        Raises RewardError, and the errors of `evaluate`.
        """

    def learned(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the algorithm after the policy has learned a step's StepBatch; return the learner's metrics of it."""

    def record(self, ledger: Ledger, step: int, experience: Experience) -> None:
        """Record the samples of a step, once."""

    def kl_coefficient_after(self, step: int) -> float | None:
        """Return the KL coefficient of the step after `step`, for a checkpoint; None if it is not adaptive."""

    def restore(self, step: int, kl_coefficient: float | None) -> None:
        """Resume after `step` with the result of `kl_coefficient_after`; with None, use the spec's settings."""
