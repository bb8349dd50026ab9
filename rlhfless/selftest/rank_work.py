"""Work that ranks run in their own processes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.attention_check import head_width, padded_difference
from rlhfless.functions.attention_check import packed_difference as kernel_difference
from rlhfless.functions.attention_kernels import packed_rows_take, uses_varlen
from rlhfless.functions.base import RankPlace
from rlhfless.functions.host_offload import HostOffload, held_bytes
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.policy import CHECK_TOLERANCE
from rlhfless.functions.policy_loading import compile_layers, restore_layers
from rlhfless.functions.training.checkpoint import drain
from rlhfless.prefixes.packing import ALWAYS, NEVER
from rlhfless.records import FinishReason, FloatArray, Group, Probe, Prompt, PublishedWeights, Rollout
from rlhfless.spec import LearnerSpec, RunSpec
from rlhfless.weights.store import FolderStore

if TYPE_CHECKING:
    from rlhfless.selftest.check import Subject

PROMPTS, SAMPLES = 4, 4
LONGEST_TOKENS = 1024
"""The longest response in the batch: long enough to measure a rate, short enough for any model."""

SEED = 7
BUFFER_BYTES, ROUNDS = 2**28, 5


def serve(end: Connection, spec: RunSpec, rank: int, ranks: int, meeting: str) -> None:
    """Serve as a learner rank until the other end closes: report the start, then each result."""

    def answer(work: Any, *arguments: Any) -> Any:
        try:
            value = work(*arguments)
            end.send((value, None))
            return value
        except Exception:
            end.send((None, traceback.format_exc()))
            return None

    made: list[LearnerRank] = []

    def start() -> dict[str, Any]:
        began_s = time.monotonic()
        made.append(
            LearnerRank(
                RankPlace(rank, ranks, meeting, spec.timeouts.call_s),
                spec.model, spec.learner, spec.optimizer, spec.algorithm, spec.generation.temperature,
                spec.generation.quantization,
            )
        )  # fmt: skip
        return {"device": made[0]._policy.device.type, "start_s": time.monotonic() - began_s}

    if answer(start) is None:
        return
    while True:
        try:
            work, arguments = end.recv()
        except EOFError:
            made[0].close()
            return
        answer(work, made[0], *arguments)


def batch(subject: Subject) -> PackedBatch:
    """Return groups whose samples share their prompt, with advantages. Half of each sequence is prompt."""
    half, logprob = min(subject.asked.sequence_tokens, 2 * LONGEST_TOKENS) // 2, -np.log(subject.vocabulary)
    groups = []
    for number in range(PROMPTS):
        responses = [subject.tokens(half - sample, 97 * number + 13 * sample) for sample in range(SAMPLES)]
        groups.append((subject.tokens(half, 1000 * number), [(each, [logprob] * len(each)) for each in responses]))
    return packed(groups)


Response = tuple[Sequence[int], Sequence[float]]
"""Tokens and logprobs."""


def packed(groups: Sequence[tuple[tuple[int, ...], Sequence[Response]]]) -> PackedBatch:
    """Pack prompts with their responses, with alternating advantages of 1 and -1."""
    made = []
    for number, (tokens, responses) in enumerate(groups):
        prompt = Prompt(f"p{number}", tokens, "")
        rollouts = tuple(
            Rollout(
                prompt.prompt_id, sample, 0, np.array(response), np.array(logprobs, dtype=np.float32), "",
                FinishReason.STOP, (), "selftest", 0.0, 1.0,
            )
            for sample, (response, logprobs) in enumerate(responses)
        )  # fmt: skip
        made.append(Group.of(prompt, rollouts))
    batch = pack(made)
    return batch.with_columns(advantages=batch.spread(np.resize([1.0, -1.0], batch.sequences)))


def learn(rank: LearnerRank, packed: PackedBatch) -> tuple[dict[str, float], float, int]:
    """Take a training step; return its metrics, its seconds, and torch's peak memory on the GPU in bytes."""
    began_s = time.perf_counter()
    metrics = rank.learn(packed, Passes())  # metrics are numbers, so the device has finished
    held = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return metrics, time.perf_counter() - began_s, held


def first_logprobs(rank: LearnerRank, packed: PackedBatch) -> FloatArray:
    """Return logprobs after a training step, which must not depend on the number of ranks."""
    rank.learn(packed, Passes())
    return rank.evaluate(packed)


def nap(rank: LearnerRank, packed: PackedBatch) -> dict[str, Any]:
    """Sleep and wake twice, because the first sleep also allocates host memory, which is kept.

    Returns seconds and bytes of the second time, and whether logprobs are unchanged.
    """
    before, host, device = rank.evaluate(packed), HostOffload(rank.kept_on_device()), rank._policy.device
    for _ in range(2):
        held = held_bytes(device)
        began_s = time.perf_counter()
        host.offload()
        asleep_s, freed = time.perf_counter(), held - held_bytes(device)
        host.restore()
        woken_s = time.perf_counter()
    return {
        "sleep_s": asleep_s - began_s,
        "wake_s": woken_s - asleep_s,
        "freed_bytes": freed,
        "state_bytes": host.size_bytes,
        "same": np.array_equal(before, rank.evaluate(packed)),
    }


def head_differs(rank: LearnerRank) -> tuple[bool, float, float]:
    """Return whether the rank uses the fused head, its difference from the plain head, and the allowed difference."""
    from rlhfless.functions.head_kernels import fused_difference

    policy = rank._policy
    dtype = torch.float32 if rank._training.head_dtype == "float32" else policy.compute_dtype
    return policy.head.fused, fused_difference(policy.head, policy.device, dtype), CHECK_TOLERANCE[dtype]


def compiled(rank: LearnerRank, packed: PackedBatch) -> dict[str, float]:
    """Time a step with plain and with compiled layers and the first compiled step; restore the plain layers.

    Also returns the largest difference of logprobs, in nats.
    """
    _, plain_s, _ = learn(rank, packed)
    before = rank.evaluate(packed)
    compile_layers(rank._model)
    try:
        difference = float(np.abs(before - rank.evaluate(packed)).max())
        _, first_s, _ = learn(rank, packed)
        _, compiled_s, _ = learn(rank, packed)
    finally:
        restore_layers(rank._model)
    return {"plain_s": plain_s, "compiled_s": compiled_s, "first_s": first_s, "difference_nats": difference}


def kernels_differ(rank: LearnerRank) -> tuple[dict[str, float], float]:
    """Return the differences of padded and packed rows from plain attention, and the allowed difference.

    Differences cover outputs and gradients, relative to the largest. If packed rows exceed the bound, the rank pads.
    """
    device, dtype, sharing = rank._policy.device, rank._policy.compute_dtype, rank._training.share_prefixes
    differences = {"padded": padded_difference(device, dtype)}
    if sharing and packed_rows_take(device, dtype):
        head = head_width(rank._model.config)
        differences["packed"] = kernel_difference(device, dtype, varlen=uses_varlen(device), head=head)
    return differences, CHECK_TOLERANCE[dtype]


def packed_difference(rank: LearnerRank, packed: PackedBatch) -> float | None:
    """Return the largest difference in nats between padded and packed logprobs; None if the model cannot be packed."""
    before = rank._policy
    if not before.packing.pays_below:
        return None
    differences = []
    for changes in ({"packing": NEVER, "varlen": False}, {"packing": ALWAYS}):
        rank._policy = replace(before, **changes)
        differences.append(rank.evaluate(packed))
    rank._policy = before
    return float(np.abs(differences[0] - differences[1]).max())


def publish(rank: LearnerRank, folder: str, step: int, probe: tuple[int, ...]) -> tuple[PublishedWeights | None, float]:
    """Publish the weights on rank 0 with the engines' probe; return them and the seconds taken."""
    began_s = time.perf_counter()
    stream, samples = rank.published(probe)
    stored = FolderStore(folder).put("selftest", 0, step, stream) if dist.get_rank() == 0 else None
    drain(stream)
    checked = Probe(probe, rank.probe_logprobs(probe), samples)
    seconds = time.perf_counter() - began_s
    if stored is None:
        return None, seconds
    return PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, checked), seconds


def rehearsed_peak(model: str, learner: LearnerSpec, rows: int, tokens: int) -> int:
    """Return the peak bytes of a learner step, from a rehearsal that computes nothing."""
    from transformers import AutoConfig

    from rlhfless.functions.memory_dry_run import peak_bytes

    return peak_bytes(AutoConfig.from_pretrained(model), learner, 1, rows, tokens)["total"]


def all_reduce_rate(rank: LearnerRank) -> float:
    """Return the rate of all-reduce (NCCL or gloo) in GB/s, the median of several rounds."""
    device, ranks = rank._policy.device, dist.get_world_size()
    buffer, times = torch.zeros(BUFFER_BYTES // 4, device=device), []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        dist.all_reduce(buffer)
        buffer[0].item()  # waits for the device
        times.append(time.perf_counter() - began_s)
    return 2 * (ranks - 1) / ranks * BUFFER_BYTES / sorted(times)[ROUNDS // 2] / 1e9
