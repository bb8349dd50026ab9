"""The expected time of an engine's start, before a run has measured one.

Runs keep the measured seconds of each phase in the user's cache folder, by model, kind of device, tensor parallelism
and vLLM version, for later runs; the last run weighs as much as all before it. The first run has a prior, for a node
that has compiled nothing for its model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from rlhfless.functions.generation.vllm.version import SUPPORTED_RELEASE, installed_version
from rlhfless.records import StartPhase
from rlhfless.scaling.acquisition import mean_phases
from rlhfless.scaling.capabilities import load_s
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.latency.startup import START_S, start_phases
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import RunSpec
from rlhfless.util.folders import home, replace_text

log = logging.getLogger(__name__)

FILE = "starts.json"


class EngineStarts:
    """The expected starts of one run's engines."""

    def __init__(self, spec: RunSpec, shape: ModelShape | None) -> None:
        self._spec = spec
        self._shape = shape

    def expected_s(self, kind: str) -> float:
        """Seconds on devices of a kind, up to the first load of the run's weights."""
        return sum(self.expected(kind).values())

    def expected(self, kind: str) -> dict[str, float]:
        """The seconds of each phase, by StartPhase."""
        kept = _kept().get(self._key(kind))
        if kept is not None:
            return kept
        if kind == CPU_KIND or self._shape is None:
            return {StartPhase.BUILD: START_S}
        return start_phases(self._shape)

    def expected_load_s(self, kind: str) -> float:
        """Seconds in which an engine loads a version; 0 where nothing is known of it."""
        if kind == CPU_KIND or self._shape is None:
            return 0.0
        return load_s(self._shape, self._spec.generation.engine.devices_per_actor)

    def keep(self, kind: str, phases: Mapping[str, float]) -> None:
        """Keep the measured seconds of each phase. If they cannot be kept, the next run begins with the prior."""
        kept = _kept()
        kept[self._key(kind)] = mean_phases([phases, kept.get(self._key(kind), phases)])
        file = _file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(kept, indent=1) + "\n")
        except OSError as error:
            log.warning("the time of an engine's start is not kept in %s: %s", file, error)

    def _key(self, kind: str) -> str:
        tensor_parallel = self._spec.generation.engine.devices_per_actor
        try:
            version = installed_version()
        except RuntimeError:  # a driver on a machine without engines
            version = SUPPORTED_RELEASE
        return f"{self._spec.model.path} on {tensor_parallel} x {kind}, vLLM {version}"


def _file() -> Path:
    return home() / FILE


def _kept() -> dict[str, dict[str, float]]:
    """The kept seconds by engine; empty if there is no file, or it cannot be read."""
    try:
        values = json.loads(_file().read_text("utf-8"))
        return {key: {str(phase): float(s) for phase, s in phases.items()} for key, phases in values.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("what is kept of engines' starts in %s cannot be read: %s", _file(), error)
        return {}
