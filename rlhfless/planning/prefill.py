"""Whether separate prefill pays off for a run, by the engine model of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.planning.memory_plan import Question
from rlhfless.planning.prediction import Lengths
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.engine_speeds import prior_of
from rlhfless.scaling.fleet_constants import KV_BYTES_PER_S, MOVE_S, kv_token_s
from rlhfless.scaling.latency.roofline import RUNTIME_S
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.prefill import AlikeEngines, PoolComparison, StepShape, compare
from rlhfless.sim.scenarios.timing import Packed
from rlhfless.spec import RunSpec


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """Generation of a step in a single pool and with separate prefill, on the same number of engines."""

    engines: int
    prefill_actors: int
    """The best number of prefill actors."""
    together_s: float
    apart_s: float
    pays: bool
    connector: str
    """The KV connector assumed."""

    @property
    def text(self) -> str:
        """Return the comparison as one line of a plan."""
        verdict = "pays" if self.pays else "does not pay"
        return (
            f"prompts on prefill actors ({self.prefill_actors} of {self.engines} actors, kv_connector "
            f"{self.connector}): generation of {self.apart_s:.3g} s against {self.together_s:.3g} s in one pool, "
            f"{verdict}"
        )


def planned_prefill(asked: Question, lengths: Lengths, model: EngineModel | None = None) -> PlannedPrefill | None:
    """Return the comparison for a run's own engines, or None with at most one engine.

    `model` is a measured engine; the default is that of the device's data sheet.
    """
    spec, kind = asked.spec, asked.sheet.kind
    if spec.supervised:
        return None
    count = spec.scaling.generation.most_actors + spec.scaling.prefill.max_actors
    engine = spec.generation.engine
    connector = spec.scaling.prefill.connector or ("folder" if kind == CPU_KIND else "nixl")
    engines = AlikeEngines(
        model or _expected(asked),
        count,
        engine.sequence_limit,
        kv_token_s(asked.shape, engine.devices_per_actor, KV_BYTES_PER_S[connector].value),
        MOVE_S.value,
    )
    found: PoolComparison = compare(_step(spec, lengths), engines)
    if not found.prefill:
        return None
    return PlannedPrefill(count, found.prefill, found.together_s, found.apart_s, found.pays, connector)


def _expected(asked: Question) -> EngineModel:
    """Return an engine by its device's data sheet, as used by predictions on GPUs and by runs on CPU cores."""
    kind = asked.sheet.kind
    prior = prior_of(kind, asked.shape, asked.spec.generation.engine.devices_per_actor)
    return prior if kind == CPU_KIND else Packed.of(prior, RUNTIME_S)


def _step(spec: RunSpec, lengths: Lengths) -> StepShape:
    return StepShape.of(
        spec.prompts_per_step,
        spec.samples_per_prompt,
        lengths.prompt_tokens,
        lengths.median_tokens,
        lengths.spread,
        spec.generation.max_tokens,
    )
