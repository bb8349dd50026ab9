"""Evaluation on held-out prompts, and which checkpoints are kept by its figures or others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlhfless.spec.base import KeptPath, SpecModel, Steps, without_user
from rlhfless.spec.data import NamedSetSpec, require_different

EVAL = "eval/"
"""What the names of evaluations' figures start with."""


class EvaluationSpec(SpecModel):
    """Evaluation on the held-out prompts, before and after the run and in between."""

    every_steps: Steps | None = None
    """Also evaluate each time this many steps are done."""

    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Samples at the training temperature, whose mean is mean@k (`eval/<reward>`); a greedy sample is always drawn in
    addition."""

    pass_at: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 16)], ...], Field(max_length=16)] = ()
    """Also the chance that one of k samples passes, for these k (`eval/<reward>_pass@<k>`): the unbiased estimator from
    `samples_per_prompt` samples (Chen et al., arXiv 2107.03374). Twice k samples or more make it steady."""

    pass_from: float = 1.0
    """A sample passes a reward if it gets at least this, before the weight."""

    sets: Annotated[tuple[NamedSetSpec, ...], Field(max_length=16)] = ()
    """Further held-out prompts, each set with figures of its own (`eval/<set>/<reward>`)."""

    @model_validator(mode="after")
    def _enough_samples_to_pass(self) -> EvaluationSpec:
        most = max(self.pass_at, default=0)
        if most > self.samples_per_prompt:
            raise ValueError(
                f"pass_at has {most}, but samples_per_prompt is {self.samples_per_prompt}: of a prompt at least {most} "
                f"samples are needed; set samples_per_prompt to {most} or more"
            )
        require_different([each.name for each in self.sets])
        return self


class BestSpec(SpecModel):
    """Which checkpoint is the best: it is kept when others are deleted, and marked where checkpoints are listed."""

    metric: Annotated[str, Field(min_length=1)] = "auto"
    """A metric of docs/metrics.md, such as `eval/exact_match_pass@4`. `auto`: with held-out prompts `eval/reward_mean`,
    or `eval/loss` of runs that learn from written responses; without them `reward_mean`, or `loss`, of the step. A
    figure of an evaluation counts for the checkpoint of the same step alone."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether its largest or its smallest value is the best. `auto`: the smallest of metrics whose name ends with
    `loss`, and the largest of others."""

    save: bool = True
    """Where `metric` is a figure of evaluations: also save after each evaluation that improves it."""

    @property
    def of_evaluations(self) -> bool:
        """Whether the metric is measured by evaluations, and not by every step."""
        return self.metric.startswith(EVAL)

    def resolved(self, *, supervised: bool, held_out: bool) -> BestSpec:
        """With the metric and the mode that `auto` stands for."""
        step_metric = "loss" if supervised else "reward_mean"
        metric = self.metric if self.metric != "auto" else f"{EVAL if held_out else ''}{step_metric}"
        mode = self.mode if self.mode != "auto" else "min" if metric.endswith("loss") else "max"
        return self.model_copy(update={"metric": metric, "mode": mode})


class CheckpointSpec(SpecModel):
    """Model and tokenizer in Hugging Face format, with everything that a resumed run needs."""

    url: KeptPath | None = None
    """Where checkpoints are kept, in a folder named as the run: a folder, or a URL that fsspec knows (`s3://...`,
    `gs://...`; with its package installed). The learner writes there, from whichever node it is on, and the run lists
    them. By default they are under the output folder, which the learner's node must share then."""

    every_steps: Steps | None = 20
    """Save each time this many steps are done, and always at the end. A resumed run learns at most this many steps
    again, from its journal; without a number, all of them."""

    background: bool = True
    """Write checkpoints while the run goes on, where the learner's nodes have memory for a copy of its state (12 bytes
    per parameter over all nodes, 16 with `learner.ema_decay`, in at most half of what is free on each); otherwise the
    run waits for each."""

    keep_last: Steps = 2
    """The number of newest checkpoints that are kept, in addition to the best."""

    best: BestSpec = BestSpec()

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, url: str | None) -> str | None:
        return url and without_user(url, "give it to the package of the store in its environment variables")
