"""Evaluation on held-out prompts, and which checkpoints are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlhfless.spec.base import KeptPath, SpecModel, Steps, without_user
from rlhfless.spec.data import NamedSetSpec, require_different

EVAL = "eval/"
"""Prefix of evaluation metric names."""


class EvaluationSpec(SpecModel):
    """Evaluation on held-out prompts: before the run, after it, and optionally in between."""

    every_steps: Steps | None = None
    """Also evaluate every this many steps. `null`: only before and after the run."""

    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Samples per prompt at the training temperature; their mean is mean@k (`eval/<reward>`). A greedy sample is always
    generated in addition."""

    pass_at: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 16)], ...], Field(max_length=16)] = ()
    """Values of k for which pass@k is reported (`eval/<reward>_pass@<k>`): the probability that at least one of k
    samples passes, by the unbiased estimator of Chen et al. (arXiv 2107.03374). Each k must be at most
    `samples_per_prompt`; use at least twice k samples for a stable estimate."""

    pass_from: float = 1.0
    """Smallest reward, before weighting, with which a sample passes."""

    sets: Annotated[tuple[NamedSetSpec, ...], Field(max_length=16)] = ()
    """More sets of held-out prompts, each reported separately (`eval/<set>/<reward>`)."""

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
    """Selects the best checkpoint. It is kept when others are deleted, and marked in lists of checkpoints."""

    metric: Annotated[str, Field(min_length=1)] = "auto"
    """A metric of docs/metrics.md, such as `eval/exact_match_pass@4`. `auto`: with held-out prompts,
    `eval/reward_mean`, or `eval/loss` for runs that learn from written responses; otherwise `reward_mean` or `loss` of
    the step. An evaluation metric counts only for the checkpoint of the same step."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether the largest or smallest value is best. `auto`: the smallest if the metric's name ends with `loss`,
    otherwise the largest."""

    save: bool = True
    """If `metric` is an evaluation metric, also save a checkpoint after each evaluation that improves it."""

    @property
    def of_evaluations(self) -> bool:
        """Whether the metric comes from evaluations instead of every step."""
        return self.metric.startswith(EVAL)

    def resolved(self, *, supervised: bool, held_out: bool) -> BestSpec:
        """Return a copy with `auto` replaced by the actual metric and mode."""
        step_metric = "loss" if supervised else "reward_mean"
        metric = self.metric if self.metric != "auto" else f"{EVAL if held_out else ''}{step_metric}"
        mode = self.mode if self.mode != "auto" else "min" if metric.endswith("loss") else "max"
        return self.model_copy(update={"metric": metric, "mode": mode})


class CheckpointSpec(SpecModel):
    """Checkpoints: model and tokenizer in Hugging Face format, plus everything needed to resume the run."""

    url: KeptPath | None = None
    """Where checkpoints are stored, in a folder named after the run: a folder or an fsspec URL (`s3://...`, `gs://...`;
    the matching package must be installed). The learner writes there from its node, and the run lists them. `null`: the
    output folder, which the learner's node must then share."""

    every_steps: Steps | None = 20
    """Save every this many steps; the end of the run is always saved. A resumed run replays at most this many steps
    from its journal. `null`: save only at the end; a resumed run replays all steps."""

    background: bool = True
    """Write checkpoints in the background if the learner's nodes have memory for a copy of its state: 12 bytes per
    parameter over all nodes (16 with `learner.ema_decay`), using at most half of the free memory of each node.
    Otherwise the run waits for each checkpoint."""

    keep_last: Steps = 2
    """Number of newest checkpoints to keep, in addition to the best."""

    best: BestSpec = BestSpec()

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, url: str | None) -> str | None:
        return url and without_user(url, "give it to the package of the store in its environment variables")
