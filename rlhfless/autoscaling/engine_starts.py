"""How long an engine of a run is expected to take until it is up, before the run has seen a start.

What runs measure is kept in the user's cache folder for each model, kind of device, tensor parallelism and vLLM
version, so the second run plans with figures. The first one has a prior, of a node that has compiled nothing for this
model yet.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from rlhfless.folders import home
from rlhfless.functions.generation.vllm.version import SUPPORTED_RELEASE, installed_version
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.latency.startup import START_S, start_s, weight_load_s
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import RunSpec

log = logging.getLogger(__name__)

FILE = "starts.json"

COMPILE_S = 60.0
"""What a cold compile cache adds on a GPU, where a warm one is in `startup.START_S`: vLLM's own log has 30 to 90 s for
models of 7 to 32 billion parameters. An assumption until a GPU has been measured."""

DISK_BYTES_PER_S = 1.75e9
"""Rate at which an engine reads the model's own weights, as in the measurement that `startup` cites."""

KEPT = 0.5
"""Weight of what earlier runs have measured."""


class EngineStarts:
    """The expected starts of one run's engines."""

    def __init__(self, spec: RunSpec, shape: ModelShape | None) -> None:
        self._spec = spec
        self._shape = shape

    def expected_s(self, kind: str) -> float:
        """Seconds on devices of a kind, without the load of the learner's weights."""
        kept = _kept().get(self._key(kind))
        if kept is not None:
            return kept
        if kind == CPU_KIND or self._shape is None:
            return START_S
        return start_s(self._shape) + COMPILE_S + weight_load_s(self._shape, DISK_BYTES_PER_S)

    def keep(self, kind: str, seconds: float) -> None:
        """Keep what a run has measured. Without a place to keep it the next run begins with the prior."""
        kept = _kept()
        before = kept.get(self._key(kind), seconds)
        kept[self._key(kind)] = KEPT * before + (1 - KEPT) * seconds
        file, new = _file(), _file().with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
            new.replace(file)
        except OSError as error:
            log.warning("the time of an engine's start is not kept in %s: %s", file, error)

    def _key(self, kind: str) -> str:
        tensor_parallel = self._spec.generation.engine.tensor_parallel_size
        try:
            version = installed_version()
        except RuntimeError:  # a driver on a machine without engines
            version = SUPPORTED_RELEASE
        return f"{self._spec.model.path} on {tensor_parallel} x {kind}, vLLM {version}"


def _file() -> Path:
    return home() / FILE


def _kept() -> dict[str, float]:
    """Nothing if there is no file, or none that can be read."""
    try:
        values = json.loads(_file().read_text("utf-8"))
        return {str(key): float(value) for key, value in values.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("what is kept of engines' starts in %s cannot be read: %s", _file(), error)
        return {}
