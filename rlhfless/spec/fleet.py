"""Where functions run, how many of them, and how weights reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import SpecModel
from rlhfless.spec.policies import CostAwareSpec, PolicySpec


class PlacementSpec(SpecModel):
    """Which functions share devices."""

    mode: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: all functions share all devices. `disaggregated`: the learner (and the reference and
    scoring functions) have devices of their own, named by `learner_devices`."""

    devices: Annotated[int, Field(ge=1)] | None = None
    """Devices of the run (GPUs, or CPU cores); all that the cluster has when left out."""

    learner_devices: Annotated[int, Field(ge=1)] = 1
    """Devices set aside for the learner side when disaggregated."""

    ray_address: str | None = None
    """Address of a running Ray cluster; a private one, which only this machine can reach, is started when left out."""

    trusted_network: bool = False
    """Join a cluster on other machines although RAY_AUTH_MODE is `disabled`: anyone who reaches its ports can run code
    there. Only where the network is closed to all others."""


class GenerationScalingSpec(SpecModel):
    """Bounds on the number of generation actors. A static fleet is min = max."""

    min_actors: Annotated[int, Field(ge=1)] = 1
    max_actors: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> GenerationScalingSpec:
        if self.max_actors < self.min_actors:
            raise ValueError(f"max_actors ({self.max_actors}) is below min_actors ({self.min_actors})")
        return self

    @property
    def fixed(self) -> bool:
        """The number of actors is given, and nothing decides about it."""
        return self.min_actors == self.max_actors


Hold = Literal["auto", "always", "never"]
"""Between two uses: the replica stays warm, is released, or whichever the scaling policy decides."""


Per = Literal["step", "run"]
"""What a limit is for: each step, or all steps of the run together."""


class CheapestSpec(SpecModel):
    """The least cost under a deadline."""

    type: Literal["cheapest"] = "cheapest"

    deadline_s: Annotated[float, Field(gt=0)]
    """Wall clock seconds."""

    per: Per = "step"
    """Whether the deadline is each step's or the whole run's."""


class FastestSpec(SpecModel):
    """The shortest time under a budget."""

    type: Literal["fastest"] = "fastest"

    budget_usd: Annotated[float, Field(gt=0)]
    """US dollars, by the price book."""

    per: Per = "step"
    """Whether the budget is each step's or the whole run's."""


class WeightedSpec(SpecModel):
    """A compromise of time and cost, for those without a limit on either."""

    type: Literal["weighted"] = "weighted"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """1 is as fast as the devices allow, 0 as cheap. Time counts relative to the fastest plan of the step and cost
    relative to the cheapest, so the same weight suits any workload."""


ContractSpec = Annotated[CheapestSpec | FastestSpec | WeightedSpec, Field(discriminator="type")]


class ScalingSpec(SpecModel):
    """How many replicas there are, which samples each one draws, and when replicas give their devices back."""

    policy: PolicySpec = CostAwareSpec()
    """What decides during a run, between the bounds below: a name, or `{type: ...}` with keys of its own. `cost_aware`
    plans each step from forecasts of its lengths, under the contract. `static` has `max_actors` at all times; the
    others are what others do. All are described in docs/policies.md, and one of your own in docs/extending.md."""

    contract: ContractSpec = WeightedSpec()
    """What the run is to reach at what price. Left out, time and cost count alike: one percent of the one as much as
    one percent of the other. A fleet with `min_actors` = `max_actors` costs the same whatever is decided, so only time
    counts there. Policies other than `cost_aware` leave it aside."""

    generation: GenerationScalingSpec = GenerationScalingSpec()
    hold_scoring: Hold = "auto"
    """Between its uses. With `auto` the policy decides; the others are bounds on it, as `min_actors` is."""
    hold_reference: Hold = "auto"
    """Between its uses. With `auto` the policy decides; the others are bounds on it, as `min_actors` is."""

    prices: str | None = None
    """Price book (YAML); the bundled one when left out."""


class WeightsSpec(SpecModel):
    """The store through which the learner's weights reach the actors."""

    store: Literal["folder", "http"] = "folder"
    """`folder`: a folder that all functions see, in shared memory by default (one node). `http`: the
    learner's node serves the files, and every node keeps a cache."""

    folder: str | None = None
    """Folder of the store, or of the node cache."""

    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference between the engine's and the learner's logprobs of the probe tokens, for logprobs of up to
    10; in proportion for larger ones. The mean over the tokens may be an eighth of it. Chosen by dtype when left
    out."""

    read_back: bool = True
    """After each load, elements of every tensor are read back from the engine's layers and must be the learner's, bit
    for bit. Switch it off for an engine that is meant to change weights as it loads them."""

    rollout_difference_limit: Annotated[float, Field(gt=0)] | None = None
    """Largest mean difference, in nats, between the learner's and the engines' logprobs of a step's tokens (metric
    `rollout_logprob_difference`): one step above it is a warning, the second in a row stops the run. Left out, it is 4
    times the median of the last 20 steps."""


class TimeoutsSpec(SpecModel):
    """Every wait has an end. A run that exceeds one stops, and says which and for what."""

    start_s: Annotated[float, Field(gt=0)] = 600.0
    """A replica's start: process, model, engine."""
    generate_s: Annotated[float, Field(gt=0)] = 3600.0
    """One step's generation on one actor."""
    call_s: Annotated[float, Field(gt=0)] = 600.0
    """One scoring, reference or learner call."""
    sync_s: Annotated[float, Field(gt=0)] = 120.0
    """One actor's weight load with its checks."""
    drain_s: Annotated[float, Field(gt=0)] = 30.0
    """A replica's orderly stop; after that it is killed."""
    stop_s: Annotated[float, Field(gt=0)] = 25.0
    """The orderly stop of the whole run after Ctrl-C or SIGTERM; after that all its processes are killed. Kubernetes
    and Slurm kill what is left 30 s after SIGTERM, and `docker stop` after 10 s unless told otherwise."""


class RecoverySpec(SpecModel):
    """What dies is noticed and replaced, and nothing that was drawn is lost (docs/faults.md)."""

    lease_s: Annotated[float, Field(gt=0)] = 60.0
    """A replica that hears nothing from the run for so long gives its device back; one that the run hears nothing
    from for so long is replaced."""

    beat_s: Annotated[float, Field(gt=0)] = 60.0
    """A generation engine that is at work and silent for so long is replaced. One iteration must take less."""

    per_step: Annotated[int, Field(ge=0)] = 3
    """So many recoveries of one step; with the next fault the run stops. It can be resumed then."""
