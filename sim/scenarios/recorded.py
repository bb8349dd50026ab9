"""The keys of a scenario that the trace of its recorded workload holds."""

from __future__ import annotations

from typing import Any

from rlhfless.records.schema import TraceError
from rlhfless.records.traces import read_meta, trace_folder
from rlhfless.sim.workloads.runtime import read_runtime


def with_recorded_keys(data: dict[str, Any]) -> dict[str, Any]:
    """The scenario's values, with those of its trace for keys that it leaves out. Raises TraceError, WorkloadError."""
    workload = data.get("workload")
    if (
        not isinstance(workload, dict)
        or workload.get("type") != "recorded"
        or not isinstance(workload.get("path"), str)
    ):
        return data
    folder = trace_folder(workload["path"])
    spec, drawn = read_meta(folder).spec, read_runtime(folder)
    if not drawn:
        raise TraceError(f"{folder} has no step with rollouts; name the trace of a run that has drawn some")
    first = drawn[0]
    generation, engine = spec.get("generation", {}), spec.get("generation", {}).get("engine", {})
    # A spec that no devices have settled leaves keys at `auto`: the scenario has its own defaults for these.
    learner = spec.get("learner") or {}
    engine, learner = ({key: value for key, value in of.items() if value != "auto"} for of in (engine, learner))
    longest = max(int(batch.response_tokens.max()) for batch in drawn)
    recorded = {
        "prompts_per_step": first.groups,
        "samples_per_prompt": first.samples // first.groups,
        "max_tokens": generation.get("max_tokens", longest),
        "steps": len(drawn),
        "heartbeat_s": generation.get("progress_interval_s"),
        "engine": {
            "max_sequences": engine.get("max_sequences"),
            "max_batch_tokens": engine.get("max_batch_tokens"),
            "tensor_parallel": engine.get("tensor_parallel_size"),
        },
        "learner": {
            "mini_batches": spec.get("mini_batches"),
            "epochs": spec.get("epochs"),
            "micro_batch_tokens": learner.get("micro_batch_tokens"),
            "gradient_checkpointing": learner.get("gradient_checkpointing"),
        },
    }
    return _filled(data, recorded)


def _filled(given: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    filled = dict(given)
    for name, value in recorded.items():
        section = filled.setdefault(name, {}) if isinstance(value, dict) else None
        if isinstance(section, dict):
            filled[name] = _filled(section, value)
        elif value is not None:
            filled.setdefault(name, value)
    return filled
