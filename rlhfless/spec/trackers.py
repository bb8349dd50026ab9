"""Trackers of experiments that get a run's metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel

Label = Annotated[str, Field(min_length=1, max_length=128)]


class _Tracker(SpecModel):
    responses: Annotated[int, Field(ge=0, le=64)] = 8
    """Responses of each step to show, with prompt and reward. They need `logging.record_tokens`. 0: none."""


class WandbSpec(_Tracker):
    """Weights & Biases. Its key and address come from its environment variables, such as `WANDB_API_KEY`."""

    type: Literal["wandb"]
    project: Label = "rlhfless"
    """Project of the run."""
    entity: Label | None = None
    """User or team that the project belongs to. `null`: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: write to the run's folder; `wandb sync` uploads it."""


class MlflowSpec(_Tracker):
    """MLflow. Its server is that of `MLFLOW_TRACKING_URI`; without one, the run's folder has a database."""

    type: Literal["mlflow"]
    experiment: Label = "rlhfless"
    """Experiment of the run."""


class TrackioSpec(_Tracker):
    """trackio, which writes to this machine, or to a space on the Hugging Face hub."""

    type: Literal["trackio"]
    project: Label = "rlhfless"
    """Project of the run."""
    space: Label | None = None
    """Space, such as `user/name`. `null`: on this machine, in `TRACKIO_DIR`."""


TrackerSpec = Annotated[WandbSpec | MlflowSpec | TrackioSpec, Field(discriminator="type")]
