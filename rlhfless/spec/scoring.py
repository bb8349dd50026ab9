"""How rewards are computed: the number of worker processes, and what happens to samples with a failed reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.base import Duration, Processes, Ranks, SpecModel


class RewardPart(SpecModel):
    """The fields that all rewards have."""

    name: str | None = None
    """Name in logs and traces; by default the type. Names must differ."""

    weight: float = 1.0
    """Factor in the weighted sum that the algorithm sees."""

    sets: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)] | None = None
    """Only for prompts of these sets of `prompts.mixture` or `evaluation.sets`; by default for all."""

    def scores(self, source: str) -> bool:
        """Whether it is for prompts of a set."""
        return self.sets is None or source in self.sets

    @property
    def label(self) -> str:
        return self.name or str(getattr(self, "type", "reward"))


OnFailure = Literal["drop", "zero", "fail"]


class ScoringSpec(SpecModel):
    """The worker processes of rewards that run code, and what a failing reward means."""

    workers: Processes = 2
    """Worker processes for rewards of type python, math, code and json_schema; none are started without such a
    reward. Two, so that one slow sample does not hold up all others; more for slow rewards, up to a core each."""

    reward_model_ranks: Ranks = "auto"
    """Ranks that share each reward model and the samples, on devices of the learner's side, each a process of its own.
    `auto`: on GPUs one on each device of the side, up to those of a node, as far as the memory plan allows; on CPU
    cores 1."""

    on_failure: OnFailure = "drop"
    """When a reward fails on a sample. `drop`: the sample is left out of its group's statistics and of the loss.
    `zero`: the part counts 0. `fail`: the run stops. The default is `drop`, because a zero would mean that the
    response was bad, and a failed reward does not show that."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops when more than this share of a step's samples has failed. If half of them fail, the cause is more
    likely the reward than the responses."""

    http_hosts: Annotated[tuple[str, ...], Field(max_length=1024)] | None = None
    """If given, HTTP rewards reach no loopback, link-local or metadata address but these, as `host:port`; redirects and
    names that resolve to such addresses are refused as well. A service sets this for the runs of its users."""

    timeout_s: Duration = 300.0
    """Longest time for one batch of finished groups; samples that are not scored by then have failed. Half of
    `timeouts.call_s`, so that a reward that hangs on every sample costs samples and not the run."""
