"""The file that calibration writes, and that scenarios and replays name: the seconds of each stage of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rlhfless.scaling.latency.fitted import BentEngine
from rlhfless.scaling.latency.timeline import KNOTS
from rlhfless.spec import document
from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import explain

NotNegative = Annotated[float, Field(ge=0)]


class EngineFit(SpecModel):
    """The generation engine: `rlhfless.scaling.latency.BentEngine`."""

    fixed_s: NotNegative
    """Seconds of each decode iteration."""
    sequence_s: Annotated[tuple[NotNegative, ...], Field(min_length=len(KNOTS), max_length=len(KNOTS))]
    """Seconds of each sequence above each of KNOTS, up to the next."""
    context_s: NotNegative
    """Seconds of each token of context that it reads."""
    prefill_token_s: NotNegative
    """Seconds of each prompt token."""
    prefill_context_s: NotNegative
    """Seconds of each pair of a prompt token and a token that it attends to."""


class LineFit(SpecModel):
    """Seconds of a call: a fixed part, and one for each token."""

    fixed_s: NotNegative
    token_s: NotNegative = 0.0

    def at(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


class LatencyFile(SpecModel):
    """Fitted seconds of every stage, and the runs they were fitted to."""

    traces: tuple[str, ...]
    """Runs, by name."""
    steps: Annotated[int, Field(ge=1)]
    """Their total number of steps."""
    device_kind: str
    """Device kind of the generation actors."""
    generation: EngineFit
    call_s: NotNegative
    """A generation call's time outside its samples."""
    load_weights_s: NotNegative
    """One actor's load."""
    start_s: NotNegative
    """An actor's start until it is up."""
    group_s: NotNegative
    """Scoring, per prompt group."""
    columns: dict[str, LineFit] = Field(default_factory=dict)
    """By function that computes a column, such as the reference: one group."""
    evaluate: LineFit | None = None
    """Old logprobs of the batch; None if there is one update per step."""
    updates: dict[str, LineFit] = Field(default_factory=dict)
    """By function that learns before the learner, such as a critic: its update of a step."""
    learn: LineFit
    publish_s: NotNegative
    driver_s: NotNegative
    """Time of a step in which no function worked: calls on their way, the driver's own bookkeeping."""
    helper_cores: NotNegative = 0.0
    """CPU cores that were busy with other work while the engines worked, for each core of an engine; 0 if engines have
    devices of their own."""
    mean_s: dict[str, NotNegative]
    """Mean seconds of the steps, by stage."""

    @property
    def engine(self) -> BentEngine:
        """The engine model."""
        return BentEngine(**self.generation.model_dump())


def load_latency(path: str | os.PathLike[str]) -> LatencyFile:
    """Reads the file. Raises InputError with all problems."""
    try:
        parsed = document.parse(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        hint = "name a file that `rlhfless simulate --calibrate` has written"
        raise InputError(str(path), [Problem("", f"cannot be read: {error}", hint)]) from error
    except document.DocumentError as error:
        raise InputError(str(path), [error.problem]) from error
    try:
        return LatencyFile.model_validate(parsed.data)
    except ValidationError as error:
        raise InputError(str(path), explain(error, LatencyFile, parsed.origins)) from error


def write_latency(latency: LatencyFile, path: Path) -> None:
    """Writes it as YAML. Raises OSError."""
    values: dict[str, Any] = latency.model_dump(mode="json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# How long each stage takes, fitted to recorded runs by `rlhfless simulate --calibrate`.\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(document.dump(values))
