"""The file of the seconds of each stage of a run: calibration writes it, scenarios and replays read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhfless.scaling.accounting import Phase, column_phase
from rlhfless.scaling.latency.fitted import BentEngine
from rlhfless.scaling.latency.timeline import KNOTS
from rlhfless.spec import document
from rlhfless.spec.base import SpecModel
from rlhfless.spec.load import read_values

NotNegative = Annotated[float, Field(ge=0)]


class EngineFit(SpecModel):
    """The generation engine: `rlhfless.scaling.latency.BentEngine`."""

    fixed_s: NotNegative
    """Seconds of each decode iteration."""
    sequence_s: Annotated[tuple[NotNegative, ...], Field(min_length=len(KNOTS), max_length=len(KNOTS))]
    """Seconds of each sequence above each of KNOTS, up to the next."""
    context_s: NotNegative
    """Seconds of each token of context that an iteration reads."""
    prefill_token_s: NotNegative
    """Seconds of each prompt token."""
    prefill_context_s: NotNegative
    """Seconds of each pair of a prompt token and a token that it attends to."""


class LineFit(SpecModel):
    """Seconds of a call: a fixed time, and a time per token."""

    fixed_s: NotNegative
    token_s: NotNegative = 0.0

    def at(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens

    def times(self, factor: float) -> LineFit:
        """Return the fit for devices on which a token takes `factor` times as long; the fixed time stays."""
        return LineFit(fixed_s=self.fixed_s, token_s=self.token_s * factor)


class TurnFit(SpecModel):
    """Seconds of a function that takes turns on its devices."""

    sleep_s: NotNegative
    """Until its devices' memory is free."""
    wake_s: NotNegative
    """Until it has the memory again. In a run an actor wakes while it loads, so `load_weights_s` includes its wake."""


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
    """Seconds of a generation call in which none of its samples runs."""
    load_weights_s: NotNegative
    """Seconds of one actor's load."""
    start_s: NotNegative
    """Seconds of an actor's start."""
    starts: dict[str, NotNegative] = Field(default_factory=dict)
    """By other function: seconds of its start."""
    turns: dict[str, TurnFit] = Field(default_factory=dict)
    """By function that slept between two turns."""
    group_s: NotNegative
    """Seconds of scoring per prompt group."""
    columns: dict[str, LineFit] = Field(default_factory=dict)
    """By function that computes a per-token output, such as the reference: one group."""
    evaluate: LineFit | None = None
    """The learner's old logprobs of the batch; None if there is one update per step."""
    updates: dict[str, LineFit] = Field(default_factory=dict)
    """By function that learns before the learner, such as a critic: its update of a step."""
    learn: LineFit
    publish_s: NotNegative
    driver_s: NotNegative
    """Seconds of a step in which no function works: calls in transit, the driver's own bookkeeping."""
    helper_cores: NotNegative = 0.0
    """CPU cores that other processes kept busy while the engines worked, per core of an engine; 0 if engines have
    devices of their own."""
    mean_s: dict[str, NotNegative]
    """Mean seconds of the steps, by stage."""

    def scaled(self, factors: Mapping[str, float]) -> LatencyFile:
        """Return the file with the seconds of each stage, by its phase, multiplied by its factor; other stages stay."""

        def of(phase: str, seconds: float) -> float:
            return seconds * factors.get(phase, 1.0)

        def line(phase: str, fit: LineFit) -> LineFit:
            return LineFit(fixed_s=of(phase, fit.fixed_s), token_s=of(phase, fit.token_s))

        engine = self.generation.model_copy(
            update={
                name: tuple(of(Phase.GENERATION, each) for each in value)
                if isinstance(value, tuple)
                else of(Phase.GENERATION, value)
                for name, value in self.generation
            }
        )
        changes: dict[str, object] = {
            "generation": engine,
            "call_s": of(Phase.GENERATION, self.call_s),
            "load_weights_s": of(Phase.SYNC, self.load_weights_s),
            "publish_s": of(Phase.SYNC, self.publish_s),
            "group_s": of(Phase.SCORING, self.group_s),
            "columns": {name: line(column_phase(name), fit) for name, fit in self.columns.items()},
            "updates": {name: line(column_phase(name), fit) for name, fit in self.updates.items()},
            "evaluate": None if self.evaluate is None else line(Phase.LEARN, self.evaluate),
            "learn": line(Phase.LEARN, self.learn),
        }
        return self.model_copy(update=changes)

    @property
    def engine(self) -> BentEngine:
        return BentEngine(**self.generation.model_dump())


def load_latency(path: str | os.PathLike[str]) -> LatencyFile:
    """Read the file. Raises InputError with all problems."""
    return read_values(path, LatencyFile, "name a file that `rlhfless simulate --calibrate` has written")


def write_latency(latency: LatencyFile, path: Path) -> None:
    """Write the file as YAML. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "# How long each stage takes, fitted to recorded runs by `rlhfless simulate --calibrate`.\n"
    path.write_text(head + document.dump(latency.model_dump(mode="json")), "utf-8")
