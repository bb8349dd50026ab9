"""Seconds and sizes of a scenario's parts, by the formulas of docs/simulate.md. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfless.records import FunctionName
from rlhfless.scaling.engine_model import EngineModel, Speculating
from rlhfless.scaling.fleet_constants import TurnTimes, engine_turns, state_turns
from rlhfless.scaling.latency.aiconfigurator import MeasuredKernels
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.latency.kernel_tables import NoTables, tables_folder
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import PROCESS_BYTES, TENSOR_PARALLEL_BYTES, engine_parts
from rlhfless.sim.replay.latency_file import LatencyFile, load_latency
from rlhfless.sim.scenarios.cluster import MeasuredTimes
from rlhfless.sim.scenarios.model import FittedLatency, KernelsLatency
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.scenarios.work import LearnerTimingSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.generation import USUAL_SEQUENCES

GB = 1e9

EIGHT, FULL = 8, 16
"""Bits of a byte, and of a format that is not quantised."""

LEARN_OPERATIONS = 6
"""Operations per parameter and token of a forward and a backward pass, as an MFU counts them."""

KEPT_SHARE = 6 / 8
"""The time of a forward and backward pass that keeps its activations, as a share of one that recomputes them: MFUs are
of passes of 8 operations."""

ADAPTERS_SHARE = 0.885
"""The time of a step that trains adapters, as a share of one that trains all weights: on CPU cores, 0.87 to 0.90 were
measured (29 M parameters, rank 8). By operations it would be two thirds; no GPU has been measured."""

FORWARD_OPERATIONS = 2 * 6 / 8
"""Operations of a forward pass alone, at the rate of devices that recompute activations: 8 operations in the time of
6."""

CONTEXT_SHARE = 0.25
"""Context of a sequence at which a plan chooses the depth of drafts, as a share of `max_tokens`: the assumed length of
a response before any is known."""

LEARNER_MEMORY_SHARE = 0.8
"""Share of the devices' memory for weights, gradients and the optimiser's state; the rest is for activations."""


class DoesNotFit(InputError):
    """A model, its engine or its learner needs more than the devices have."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An engine model whose prompts share iterations: each prompt costs its part of a full iteration.

    The underlying model prices a prompt as if it were alone in an iteration, which reads all weights for it.
    """

    model: EngineModel
    runtime_s: float
    """Seconds of each decode iteration in addition to the model's kernels."""
    line: LinearEngine
    """A line through the model: its prices of a token in a large prefill, and of a pair of tokens in attention."""

    @classmethod
    def of(cls, model: EngineModel, runtime_s: float = 0.0) -> Packed:
        return cls(model, runtime_s, LinearEngine.of(model))

    @property
    def context_s(self) -> float:
        return self.model.context_s

    def iteration_s(self, sequences: int) -> float:
        return self.model.iteration_s(sequences) + self.runtime_s

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.line.prefill_s(tokens, context_tokens)


def engine_shape(scenario: Scenario) -> ModelShape:
    """Return the shape of the model in the engine, with weights and KV in the engine's formats."""
    shape, engine = scenario.model.shape, scenario.engine
    kept = replace(shape, kv_number_bytes=1 if engine.kv_bits == EIGHT else shape.weight_bytes)
    if engine.weight_bits < FULL:
        kept = replace(kept, matrix_bytes=engine.weight_bits / EIGHT)
    return replace(kept, product_bits=min(engine.product_bits, shape.product_bits))


def engine_model(scenario: Scenario, kind: str) -> EngineModel:
    """Return the latency model of one actor on devices of this kind. Raises InputError if there is none."""
    latency, runtime_s = scenario.engine.latency, scenario.engine.runtime_s
    if isinstance(latency, FittedLatency):
        runtime_s = 0.0
    packed, drafts = Packed.of(_engine_model(scenario, kind), runtime_s), scenario.engine.speculation
    if drafts is None:
        return packed
    return Speculating(
        packed,
        drafts.drafted or (1.0,) * len(drafts.accepted),
        drafts.accepted,
        None if drafts.depth == "auto" else drafts.depth,
        CONTEXT_SHARE * scenario.max_tokens,
        drafts.draft_s,
        drafts.standing_s,
    )


def _engine_model(scenario: Scenario, kind: str) -> EngineModel:
    engine, shape = scenario.engine, engine_shape(scenario)
    if isinstance(engine.latency, FittedLatency):
        return load_latency(engine.latency.path).engine
    if not isinstance(engine.latency, KernelsLatency):
        try:
            return Roofline(shape, scenario.cluster.sheet(kind), engine.tensor_parallel, engine.data_parallel)
        except UnknownShape as error:
            raise InputError(scenario.name, [Problem("engine.product_bits", str(error), "take 16")]) from error
    try:
        return MeasuredKernels.of(shape, kind, (engine.tensor_parallel, engine.data_parallel), tables_folder())
    except NoTables as error:
        problem = Problem("engine.latency", f"type `kernels`: {error}", "or use type `roofline`")
        raise InputError(scenario.name, [problem]) from error


def reserved_bytes(
    shape: ModelShape, tensor_parallel: int, batch_tokens: int, sequences: int, *, graphs: bool = True
) -> int:
    """Return the memory of a device that an engine needs besides weights and KV, as the live memory plan counts it.

    `graphs`: count CUDA graphs. vLLM before 0.21 captures them outside the memory that it may use.
    """
    parts = engine_parts(shape, "bfloat16", tensor_parallel, batch_tokens, sequences, graphs=graphs)
    other = sum(part.size_bytes for part in parts if part.name != "weights")
    return other + PROCESS_BYTES + TENSOR_PARALLEL_BYTES * (tensor_parallel > 1)


def kv_tokens(scenario: Scenario, kind: str) -> int:
    """Return the tokens whose KV fits next to the weights on one actor's devices, in all layers.

    It is a lower bound for a model with windows, whose long sequences hold less. Linear layers first keep a state for
    each of `max_sequences` sequences. Raises DoesNotFit.
    """
    shape, engine, device = engine_shape(scenario), scenario.engine, scenario.cluster.sheet(kind)
    share = 1 / min(engine.tensor_parallel, shape.kv_heads)
    reserved: float = reserved_bytes(shape, engine.tensor_parallel, engine.max_batch_tokens, engine.max_sequences)
    if engine.reserved_gb is not None:
        reserved = engine.reserved_gb * GB
    usable = device.memory_bytes.value * engine.memory_fraction - reserved
    elsewhere = shape.expert_bytes * (1 - 1 / engine.data_parallel)
    states = shape.state_bytes * engine.max_sequences / engine.data_parallel
    left = usable - (shape.total_bytes - elsewhere + states) / engine.tensor_parallel
    tokens = int(left / (shape.kv_bytes * share))
    if tokens < scenario.max_tokens:
        what = (
            f"{engine.tensor_parallel} x {kind} leaves KV memory for {max(tokens, 0)} tokens besides weights of "
            f"{shape.total_bytes / GB:.0f} GB{f' and states of {states / GB:.0f} GB' if states else ''}, fewer than "
            f"max_tokens ({scenario.max_tokens})"
        )
        hint = f"raise it, {'lower engine.max_sequences, ' if states else ''}or take devices with more memory"
        problem = Problem("engine.tensor_parallel", what, hint)
        raise DoesNotFit(scenario.name, [problem])
    return tokens * engine.data_parallel


def learner_devices_needed(scenario: Scenario, kind: str) -> int:
    """Return the fewest devices of this kind that hold the learner's state."""
    return max(
        1, -(-int(state_bytes(scenario)) // int(scenario.cluster.sheet(kind).memory_bytes.value * LEARNER_MEMORY_SHARE))
    )


def state_bytes(scenario: Scenario) -> float:
    """Return the bytes of the learner's state, on all its devices together."""
    return scenario.learner.state_bytes_per_parameter * scenario.model.shape.parameters


def learn_token_s(scenario: Scenario, kind: str, devices: int) -> float:
    """Return the seconds of forward and backward passes on `devices` devices, per generated token."""
    learner = scenario.learner
    operations = learn_operations(learner.gradient_checkpointing, learner.adapters)
    return learner.learned_share * operations * _token_s(scenario, kind, devices)


def learn_operations(recomputes: bool, adapters: bool) -> float:
    """Return the operations per parameter and token of a learning step, at the rate of recomputing activations."""
    return LEARN_OPERATIONS * (1 if recomputes else KEPT_SHARE) * (ADAPTERS_SHARE if adapters else 1)


def passes_s(scenario: Scenario, kind: str, evaluated: float) -> float:
    """Return the seconds of a step's passes that do not depend on its tokens.

    They are the learner's passes over `evaluated` batches for old logprobs and over its epochs, and the reference's
    and the teachers' passes.
    """
    learner = scenario.learner
    operations = learner.epochs * learn_operations(learner.gradient_checkpointing, learner.adapters)
    operations += FORWARD_OPERATIONS * (evaluated + (scenario.reference is not None))
    sheet = scenario.cluster.sheet(kind)
    teachers = (scenario.model.shape if each.model is None else each.model.shape for each in scenario.teachers)
    taught_s = sum(FORWARD_OPERATIONS * pass_operation_s(shape, sheet, learner) for shape in teachers)
    return operations * pass_operation_s(scenario.model.shape, sheet, learner) + taught_s


def forward_token_s(scenario: Scenario, kind: str, devices: int, shape: ModelShape | None = None) -> float:
    """Return the seconds per token of a forward pass alone, of the policy or a model with sizes of its own."""
    sizes = shape or scenario.model.shape
    return FORWARD_OPERATIONS * operation_s(sizes, scenario.cluster.sheet(kind), devices, scenario.learner)


def answer_token_s(scenario: Scenario, kind: str, devices: int, shape: ModelShape) -> float:
    """Return the seconds per token that a judge writes: its weights are read once for a full batch."""
    read_s = shape.total_bytes / (devices * scenario.cluster.sheet(kind).memory_bytes_per_s.value * USUAL_SEQUENCES)
    return forward_token_s(scenario, kind, devices, shape) + read_s


def measured_times(scenario: Scenario) -> LatencyFile | None:
    """Return the measured times of the fleet's starts, sleep and transport. Raises InputError for a bad file."""
    return load_latency(scenario.fleet.path) if isinstance(scenario.fleet, MeasuredTimes) else None


def turns_of(
    scenario: Scenario,
    measured: LatencyFile | None,
    function: str,
    kind: str,
    devices: int,
    frozen: ModelShape | None = None,
) -> TurnTimes:
    """Return the sleep and wake times of a function, measured or from the priors for the memory it holds.

    `frozen`: the sizes of a model that is not trained.
    """
    if measured is not None and (fit := measured.turns.get(function)) is not None:
        return TurnTimes(fit.sleep_s, fit.wake_s)
    if function == FunctionName.GENERATION:
        return engine_turns()
    held = state_bytes(scenario) if frozen is None else frozen.total_bytes
    return state_turns(held, scenario.cluster.sheet(kind), devices)


def start_s(scenario: Scenario, measured: LatencyFile | None, function: str, expected_s: float) -> float:
    """Return the cold start of a function in seconds, measured or expected; for a serverless container, its restore."""
    if (seller := scenario.cluster.serverless) is not None and function != FunctionName.SCORING:
        return seller.restore_s
    if measured is None:
        return expected_s
    if function == FunctionName.GENERATION:
        return measured.start_s or expected_s
    return measured.starts.get(function, expected_s)


def paid_around(scenario: Scenario, devices: int) -> tuple[float, float] | None:
    """Return the seconds before and after the learner's work of a step in which it is paid for.

    They are its restore, and the transfer of its state from and to the store. None if it keeps its devices.
    """
    if (seller := scenario.cluster.serverless) is None:
        return None
    state_s = state_bytes(scenario) / devices / seller.state_bytes_per_s
    return seller.restore_s + state_s, state_s


def publish_s(scenario: Scenario, measured: LatencyFile | None) -> float:
    """Return the seconds in which the learner's first rank writes the weights."""
    if measured is not None:
        return measured.publish_s
    transport = scenario.transport
    return transport.fixed_s + version_bytes(scenario) / transport.publish_bytes_per_s


def version_bytes(scenario: Scenario) -> int:
    """Return the bytes of a published version."""
    return scenario.learner.version_bytes or scenario.model.shape.total_bytes


def _token_s(scenario: Scenario, kind: str, devices: int) -> float:
    return operation_s(scenario.model.shape, scenario.cluster.sheet(kind), devices, scenario.learner)


def operation_s(shape: ModelShape, sheet: DeviceSheet, devices: int, timing: LearnerTimingSpec) -> float:
    """Return the seconds per token, per operation per parameter, of a model in training."""
    return shape.active / (devices * _flops_per_s(shape, sheet, timing))


def pass_operation_s(shape: ModelShape, sheet: DeviceSheet, timing: LearnerTimingSpec) -> float:
    """Return the seconds of a pass that do not depend on its tokens, per operation per parameter."""
    tokens = timing.expert_tokens if shape.experts else 0.0
    return shape.active * tokens / _flops_per_s(shape, sheet, timing)


def _flops_per_s(shape: ModelShape, sheet: DeviceSheet, timing: LearnerTimingSpec) -> float:
    """Return the operations per second of one device that learns."""
    dense = timing.mfu * sheet.flops_per_s.value
    return min(timing.expert_flops_per_s, dense) if shape.experts else dense
