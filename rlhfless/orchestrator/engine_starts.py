"""The expected times of engines' starts and loads, which a run learns and keeps for later runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from rlhfless.functions.generation.vllm.arguments import SUPPORTED_RELEASE, installed_version
from rlhfless.records import StartPhase
from rlhfless.scaling.fleet_constants import load_s
from rlhfless.scaling.latency.roofline import START_S, start_phases
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.prices import mean_phases
from rlhfless.spec import RunSpec
from rlhfless.util.folders import home, replace_text

log = logging.getLogger(__name__)

FILE = "starts.json"


class EngineStarts:
    """Expected start times of a run's engines, learned over runs and kept in a file."""

    def __init__(self, spec: RunSpec, shape: ModelShape | None, max_model_len: int = 0) -> None:
        self._spec = spec
        self._shape = shape
        self._max_model_len = max_model_len

    def expected_s(self, kind: str) -> float:
        """Return the seconds of a start on devices of a kind, excluding the first load of the run's weights."""
        return sum(self.expected(kind).values())

    def expected(self, kind: str) -> dict[str, float]:
        """Return the seconds of each phase of a start, by StartPhase."""
        kept = _kept().get(self._key(kind))
        if kept is not None:
            return kept
        if kind == CPU_KIND or self._shape is None:
            return {StartPhase.BUILD: START_S}
        return start_phases(self._shape)

    def expected_load_s(self, kind: str) -> float:
        """Return the seconds of a weight load; 0 if unknown."""
        if kind == CPU_KIND or self._shape is None:
            return 0.0
        return load_s(self._shape, self._spec.generation.engine.devices_per_actor)

    def expected_kv_tokens(self, kind: str) -> int:  # noqa: ARG002 (a setup's kinds differ)
        """Return the capacity of an engine's KV cache until it reports it: only its sequence limit is known."""
        return self._spec.generation.engine.sequence_limit * self._max_model_len

    def keep(self, kind: str, phases: Mapping[str, float]) -> None:
        """Save the measured seconds of each phase, averaged with earlier ones. Errors of the file are only logged."""
        kept = _kept()
        kept[self._key(kind)] = mean_phases([phases, kept.get(self._key(kind), phases)])
        file = _file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(kept, indent=1) + "\n")
        except OSError as error:
            log.warning("cannot save engine start times to %s: %s", file, error)

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
    """Return the saved seconds of each phase, by engine; empty if there is no file, or it cannot be read."""
    try:
        values = json.loads(_file().read_text("utf-8"))
        return {key: {str(phase): float(s) for phase, s in phases.items()} for key, phases in values.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("cannot read saved engine start times from %s: %s", _file(), error)
        return {}
