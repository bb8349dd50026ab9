"""Checks of the learner: its ranks in separate processes, as in a run, but without Ray."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.kinds import LEARNER
from rlhfless.planning.inputs import planned
from rlhfless.scaling.memory import GIB
from rlhfless.selftest import rank_work, serve_rank
from rlhfless.selftest.check import Measured, NotHere, Subject, Wrong, check
from rlhfless.spec import RunSpec

STOP_S = 20.0

PEAK_OVER_PLAN = 1.15
"""Bound on a rank's memory relative to its plan, because allocators round up."""

SAME = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference in nats between logprobs that differ only in summation order, by dtype of the pass."""


class RankProcesses:
    """Running learner ranks."""

    def __init__(self, subject: Subject, count: int, **changes: Any) -> None:
        """Start the ranks. `changes`: updates of the learner's keys.

        Raises RuntimeError if a rank is not ready within the run's `timeouts.start_s`.
        """
        context, self._wait_s = multiprocessing.get_context("spawn"), subject.spec.timeouts.start_s
        meeting = f"file://{subject.folder}/meeting-{os.urandom(4).hex()}"
        spec = _changed(subject.spec, ranks=count, **changes)
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (theirs, spec, _binding(subject, rank), rank, count, meeting)
            process = context.Process(target=serve_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        try:
            self.about: list[dict[str, Any]] = self.answers()
        except BaseException:
            self.close()
            raise

    def ask(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Send work to every rank. `answers` waits for the results."""
        for end in self._ends:
            end.send((work, arguments))

    def answers(self) -> list[Any]:
        """Return the results of all ranks in order. Raises RuntimeError if a rank fails, ends or is late."""
        collected = []
        for number, end in enumerate(self._ends):
            if not end.poll(self._wait_s):
                raise RuntimeError(f"learner rank {number} did not answer within {self._wait_s:.0f} s")
            try:
                value, fault = end.recv()
            except EOFError:
                raise RuntimeError(f"the process of learner rank {number} ended") from None
            if fault is not None:
                raise RuntimeError(f"learner rank {number} failed:\n{fault}")
            collected.append(value)
        return collected

    def do(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.ask(work, *arguments)
        return self.answers()

    def close(self) -> None:
        """Stop all processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(STOP_S)
            process.kill()


def _changed(spec: RunSpec, **keys: Any) -> RunSpec:
    return spec.model_copy(update={"learner": spec.learner.model_copy(update=keys)})


def visible(index: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES entry of this process's GPU `index`."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",")[index] if listed else str(index)


def up(subject: Subject) -> RankProcesses:
    """Return the ranks started by the check `learner`."""
    assert isinstance(subject.ranks, RankProcesses)
    return subject.ranks


def _binding(subject: Subject, rank: int) -> DeviceBinding:
    """Return a rank's devices: all cores of this machine, or a GPU, shared only if there are too few."""
    if subject.gpus:
        return DeviceBinding("cuda", (visible(rank % subject.gpus),), exclusive=False)
    cores = tuple(map(str, sorted(os.sched_getaffinity(0))))
    return DeviceBinding("cpu", cores, exclusive=False)


@check("learner", "see the trace; with little memory try more ranks or learner.offload")
def learner(subject: Subject) -> Measured:
    """Start all ranks that the plan has on this node, and measure a step of a small batch after a warm-up step."""
    count = subject.spec.learner.world_size
    ranks = subject.ranks = RankProcesses(subject, min(count, subject.gpus or count))
    about = ranks.about[0]
    wanted = "cuda" if subject.gpus else "cpu"
    if about["device"] != wanted:
        raise Wrong(f"the rank computes on {about['device']}, and was bound to {wanted}", **about)
    batch = rank_work.batch(subject)
    ranks.do(rank_work.learn, batch)
    metrics, seconds, held = ranks.do(rank_work.learn, batch)[0]
    tokens, many = len(batch.tokens), len(ranks.about)
    subject.results |= {"rank_tokens_per_s": tokens / seconds / many, "ranks": many, "held_bytes": held}
    measured = {**about, "ranks": many, "step_s": seconds, "tokens_per_s": tokens / seconds}
    measured["rank_flops_per_s"] = 6 * subject.asked.shape.active * tokens / seconds / many
    if not math.isfinite(metrics["gradient_norm"]):
        raise Wrong("the gradient is not finite", **measured)
    return measured


@check(
    "padded against packed",
    "set learner.share_prefixes: false, and report it with this file",
    needs=("learner",),
)
def packing(subject: Subject) -> Measured:
    """Compare outputs and gradients of the attention kernels with plain attention, and logprobs of a batch with shared
    prompts: padded, and with the prompts computed once."""
    found, allowed = up(subject).do(rank_work.kernels_differ)[0]
    gradients = {f"{path}_gradient_difference": share for path, share in found.items()}
    gradients["allowed_difference"] = allowed
    for path, share in found.items():
        if not share <= allowed:
            raise Wrong(f"torch's attention kernels are wrong here for {path} rows", **gradients)
    difference = up(subject).do(rank_work.packed_difference, rank_work.batch(subject))[0]
    subject.results["packs"] = difference is not None
    if difference is None:
        raise NotHere("the learner pads its batches; its log says why")
    return {**gradients, **_same(subject, difference)}


@check("fused head", "report it with this file; the learner uses the plain head", needs=("learner",), gpus=1)
def head(subject: Subject) -> Measured:
    """Compare outputs and gradients of the fused output head with the plain head."""
    used, difference, allowed = up(subject).do(rank_work.head_differs)[0]
    measured = {"largest_difference": difference, "allowed_difference": allowed, "used": used}
    if not (used and difference <= allowed):
        raise Wrong("the fused head is not used here", **measured)
    return measured


@check("compiled layers", "leave learner.compile at false", needs=("learner",), gpus=1)
def compiled(subject: Subject) -> Measured:
    """Run a learning step with plain and with compiled layers (`learner.compile`), and compare logprobs."""
    if subject.spec.learner.compile:
        raise NotHere("the spec compiles its layers, and the other checks run with them")
    answers = up(subject).do(rank_work.compiled, rank_work.batch(subject))
    measured = {name: max(answer[name] for answer in answers) for name in answers[0]}
    return {**measured, **_same(subject, measured["difference_nats"])}


@check("1 against 2 ranks", "report it with this file: the learner's sharding is wrong here")
def ranks_agree(subject: Subject) -> Measured:
    """Take the same step of the bundled model, which fits any device, with one rank and with two."""
    if subject.gpus == 1:
        raise NotHere("this node has one GPU, and NCCL refuses two ranks on it")
    small = subject.small
    once, twice = (_done(small, count, rank_work.first_logprobs, rank_work.batch(small)) for count in (1, 2))
    return _same(small, max(float(abs(logprobs - once[0]).max()) for logprobs in twice))


def _done(subject: Subject, count: int, work: Callable[..., Any], *arguments: Any, **changes: Any) -> list[Any]:
    """Start ranks for this work only, and return their results."""
    ranks = RankProcesses(subject, count, **changes)
    try:
        return ranks.do(work, *arguments)
    finally:
        ranks.close()


def _same(subject: Subject, difference: float) -> Measured:
    allowed = SAME[subject.spec.learner.dtype]
    measured = {"largest_difference_nats": difference, "allowed_nats": allowed}
    if not difference <= allowed:
        raise Wrong(f"logprobs differ by {difference:.2g} nats", **measured)
    return measured


@check(
    "peak against plan",
    "lower learner.micro_batch_tokens, and report it with this file",
    needs=("learner",),
)
def peak(subject: Subject) -> Measured:
    """Compare a step's memory with the plan: torch's peak on a GPU; on CPUs the same step on tensors without data,
    because a process there also holds memory outside the plan."""
    spec, tokens = subject.spec, int(rank_work.batch(subject).lengths.max())
    if subject.gpus:
        spec, held = _changed(spec, ranks=len(up(subject).about)), subject.results["held_bytes"]
    else:
        rows = max(spec.learner.pass_tokens // tokens, 1)
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process without a process group
            arguments = (spec.model.path, spec.learner, rows, tokens)
            rehearsed = pool.apply_async(rank_work.rehearsed_peak, arguments)
            tokens, held = rows * tokens, rehearsed.get(spec.timeouts.start_s)
    phases = planned(spec, subject.asked.shape, subject.kind, tokens)[LEARNER.name]
    measured = {"held_gib": held / GIB, "planned_gib": phases["learn"] / GIB, "share": held / phases["learn"]}
    if measured["share"] > PEAK_OVER_PLAN:
        raise Wrong("a step holds more than its plan", **measured)
    return measured


@check("offload", "leave learner.offload at false, and report it with this file", gpus=1)
def offload(subject: Subject) -> Measured:
    """Take a step of the bundled model with master weights and optimiser in host memory."""
    small = subject.small
    metrics, seconds, held = _done(small, 1, rank_work.learn, rank_work.batch(small), offload=True)[0]
    measured = {"step_s": seconds, "held_gib": held / GIB}
    if not math.isfinite(metrics["gradient_norm"]):
        raise Wrong("the gradient is not finite", **measured)
    return measured


@check("collectives", "check NVLink (`nvidia-smi topo -m`), and NCCL_DEBUG=INFO for what NCCL chose", gpus=2)
def collectives(subject: Subject) -> Measured:
    """Measure NCCL's all-reduce among this node's GPUs, in GB/s of bus bandwidth as in nccl-tests."""
    rates = _done(subject.small, subject.gpus, rank_work.all_reduce_rate)
    return {"all_reduce_gb_per_s": min(rates), "gpus": subject.gpus}
