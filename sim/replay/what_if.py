"""The inputs of a replay under another policy, on other devices, or with more or fewer actors. Pure.

A policy has the run's contract, and the run's own keys if it is the run's policy. Seconds on devices that the run did
not have are extrapolated by data sheets: reading scales with the bandwidth, products with their rate, attention with
its own share of the bandwidth. The runtime's part of an iteration and the fixed parts of calls, loads and starts stay.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from rlhfless.records import KV_CAPACITY, START
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.roofline import RUNTIME_S
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policy import Policy
from rlhfless.sim.policies import configured, make_policy
from rlhfless.sim.replay.latency_file import LatencyFile
from rlhfless.spec import ContractSpec, WeightedSpec
from rlhfless.spec.generation import EngineSpec


@dataclass(frozen=True, slots=True)
class OtherDevices:
    """Devices that the run did not have, and how far ahead of its learner it generates on them."""

    kind: str | None = None
    """Kind for the functions that were on the actors' kind; None: unchanged."""
    actors: int | None = None
    """Number of generation actors; None: the most that the run could have had (`scaling.generation.max_actors`)."""

    max_staleness: int | None = None
    """Steps that are generated ahead of the learner; None: as in the run."""

    def __str__(self) -> str:
        """Describe the extrapolation: the number of actors and the kind of devices."""
        kind = "" if self.kind is None else f"{self.kind}, by data sheets"
        return ", ".join(filter(None, ("" if self.actors is None else f"{self.actors} actors", kind)))

    def allocations(self, actors: tuple[Allocation, ...], kind: str, most: int) -> tuple[Allocation, ...]:
        """Return the devices of the actors, by slot, replacing those of `kind`.

        An actor that the run did not have is like the run's last one, on devices of its own.
        """
        count = self.actors or max(len(actors), most)
        last = actors[-1]
        added = (
            Allocation(
                tuple(Device(f"{device.name}-{number}", device.kind, device.index) for device in last.devices),
                last.shares,
            )
            for number in range(2, count - len(actors) + 2)
        )
        return tuple(self.allocation(allocation, kind) for allocation in (*actors[:count], *added))

    def allocation(self, allocation: Allocation, kind: str) -> Allocation:
        """Return the same devices, with those of `kind` replaced by the other kind."""
        to = self.kind or kind
        devices = (
            Device(device.name, to if device.kind == kind else device.kind, device.index)
            for device in allocation.devices
        )
        return Allocation(tuple(devices), allocation.shares)


def policy_of(trace: Trace) -> str:
    """Return the name of the run's own policy; `the run` if its spec names none."""
    policy = (trace.meta.spec.get("scaling") or {}).get("policy")
    return str(policy["type"]) if isinstance(policy, dict) and policy.get("type") else "the run"


def run_policy(trace: Trace, name: str | None = None) -> tuple[str, Policy]:
    """Return the named policy, by default the run's own, with the run's contract.

    Raises PolicyError for an unknown name, TraceError if the trace names none.
    """
    scaling = trace.meta.spec.get("scaling") or {}
    ran = scaling.get("policy")
    ran = ran if isinstance(ran, dict) else {}
    name = name or ran.get("type")
    if name is None:
        raise TraceError(f"the spec in the trace of {trace.meta.run_id} names no scaling.policy; name one by --policy")
    return name, make_policy(name, configured(name, ran if ran.get("type") == name else {}), run_contract(trace))


def run_contract(trace: Trace) -> RunContract:
    """Return the contract of a run, for the steps that it had."""
    written = (trace.meta.spec.get("scaling") or {}).get("contract")
    contract = TypeAdapter(ContractSpec).validate_python(written or WeightedSpec().model_dump())
    return RunContract(contract, max(len(trace.steps), 1))


def model_shape(trace: Trace) -> ModelShape | None:
    """Return the shape of the run's model; None if its folder is not here, or its config is of another kind."""
    try:
        config = json.loads((Path(trace.meta.spec["model"]["path"]) / "config.json").read_text())
        dtype = trace.meta.spec["model"].get("dtype")
        return ModelShape.of_config(config | ({"dtype": dtype} if dtype else {}))
    except (OSError, KeyError, TypeError, ValueError, UnknownShape):
        return None


def kv_tokens(trace: Trace, kind: str, to: str) -> int | None:
    """Return the tokens of an actor's KV memory, as the engines reported.

    On another kind of device the difference of memory is added. None if the trace lacks the report, or the model's
    folder is needed and is not here.
    """
    reported = [int(row.inputs.get(KV_CAPACITY, 0)) for row in trace.decisions if row.kind == START]
    known = min((tokens for tokens in reported if tokens > 0), default=None)
    if known is None or kind == to:
        return known
    shape = model_shape(trace)
    if shape is None:
        return None
    engine = EngineSpec.model_validate(trace.meta.spec["generation"]["engine"])
    more_bytes = device_of(to).memory_bytes.value - device_of(kind).memory_bytes.value
    return known + int(more_bytes * engine.gpu_memory_fraction * engine.devices_per_actor / shape.kv_bytes)


def on_kind(latency: LatencyFile, kind: str) -> LatencyFile:
    """Return the fit, extrapolated to another kind of device.

    Raises UnknownDevice for a kind without a data sheet, TraceError between CPU cores and other devices, which share no
    part of an iteration's time.
    """
    if kind == latency.device_kind:
        return latency
    if CPU_KIND in (kind, latency.device_kind):
        raise TraceError(
            f"{', '.join(latency.traces)}: seconds on {latency.device_kind} do not tell seconds on {kind}; name "
            "another kind of accelerator, or a --latency file fitted to this kind"
        )
    old, new = device_of(latency.device_kind), device_of(kind)
    products = old.flops_per_s.value * old.matmul_efficiency.value
    products /= new.flops_per_s.value * new.matmul_efficiency.value
    memory = old.memory_bytes_per_s.value / new.memory_bytes_per_s.value
    engine = latency.generation
    runtime_s = min(engine.fixed_s, RUNTIME_S)
    weights = memory * old.weights_efficiency.value / new.weights_efficiency.value
    scaled = {
        "fixed_s": runtime_s + (engine.fixed_s - runtime_s) * weights,
        "sequence_s": tuple(seconds * products for seconds in engine.sequence_s),
        "context_s": engine.context_s * memory * old.attention_efficiency.value / new.attention_efficiency.value,
        "prefill_token_s": engine.prefill_token_s * products,
        "prefill_context_s": engine.prefill_context_s * products,
    }

    changes = {
        "device_kind": kind,
        "generation": engine.model_copy(update=scaled),
        "columns": {name: fit.times(products) for name, fit in latency.columns.items()},
        "evaluate": None if latency.evaluate is None else latency.evaluate.times(products),
        "updates": {name: fit.times(products) for name, fit in latency.updates.items()},
        "learn": latency.learn.times(products),
    }
    return latency.model_copy(update=changes)
