"""Checks of the learner: its ranks in processes of their own, as in a run, but without Ray between."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.learner.kind import KIND
from rlhfless.planning.inputs import planned
from rlhfless.scaling.memory import GIB
from rlhfless.selftest import rank_process, rank_work
from rlhfless.selftest.check import Measured, NotHere, Wrong, check
from rlhfless.selftest.subject import Subject
from rlhfless.spec import RunSpec

STOP_S = 20.0

PEAK_OVER_PLAN = 1.15
"""Bound of what a rank holds, as a share of its plan: allocators round up."""

SAME = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference, in nats, between logprobs that only the order of sums tells apart, by the format of the pass."""


class RankProcesses:
    """Running learner ranks."""

    def __init__(self, subject: Subject, count: int, **changes: Any) -> None:
        """`changes`: of keys of the learner. Raises RuntimeError if a rank does not come up within the run's
        `timeouts.start_s`."""
        context, self._wait_s = multiprocessing.get_context("spawn"), subject.spec.timeouts.start_s
        meeting = f"file://{subject.folder}/meeting-{os.urandom(4).hex()}"
        spec = _changed(subject.spec, ranks=count, **changes)
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (theirs, spec, _binding(subject, rank), rank, count, meeting)
            process = context.Process(target=rank_process.begin, args=arguments, daemon=True)
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
        """Send work to every rank; `answers` waits for the results."""
        for end in self._ends:
            end.send((work, arguments))

    def answers(self) -> list[Any]:
        """The results of all ranks, by rank. Raises RuntimeError for a rank that fails, ends or is late."""
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
        """End all processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(STOP_S)
            process.kill()


def _changed(spec: RunSpec, **keys: Any) -> RunSpec:
    return spec.model_copy(update={"learner": spec.learner.model_copy(update=keys)})


def visible(index: int) -> str:
    """The entry of CUDA_VISIBLE_DEVICES of a GPU of this process."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",")[index] if listed else str(index)


def up(subject: Subject) -> RankProcesses:
    """The ranks that the check `learner` has started."""
    assert isinstance(subject.ranks, RankProcesses)
    return subject.ranks


def _binding(subject: Subject, rank: int) -> DeviceBinding:
    """The devices of a rank: all cores of this machine, or a GPU, of its own as long as there are enough."""
    if subject.gpus:
        return DeviceBinding("cuda", (visible(rank % subject.gpus),), exclusive=False)
    cores = tuple(map(str, sorted(os.sched_getaffinity(0))))
    return DeviceBinding("cpu", cores, exclusive=False)


@check("learner", "see the trace; with little memory try more ranks or learner.offload")
def learner(subject: Subject) -> Measured:
    """All ranks that the plan has on this node, and one step of a small batch after one that warms up."""
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
    """Outputs and gradients of the attention kernels against plain attention, and logprobs of a batch whose sequences
    share prompts: padded, and with the prompts computed once."""
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
    """Outputs and gradients of the fused output head against the plain one's."""
    used, difference, allowed = up(subject).do(rank_work.head_differs)[0]
    measured = {"largest_difference": difference, "allowed_difference": allowed, "used": used}
    if not (used and difference <= allowed):
        raise Wrong("the fused head is not used here", **measured)
    return measured


@check("compiled layers", "leave learner.compile at false", needs=("learner",), gpus=1)
def compiled(subject: Subject) -> Measured:
    """A learning step with plain layers and with compiled ones (`learner.compile`), and the difference of logprobs."""
    if subject.spec.learner.compile:
        raise NotHere("the spec compiles its layers, and the other checks run with them")
    answers = up(subject).do(rank_work.compiled, rank_work.batch(subject))
    measured = {name: max(answer[name] for answer in answers) for name in answers[0]}
    return {**measured, **_same(subject, measured["difference_nats"])}


@check("1 against 2 ranks", "report it with this file: the learner's sharding is wrong here")
def ranks_agree(subject: Subject) -> Measured:
    """The same step of the bundled model, which any device holds, by one rank and by two."""
    if subject.gpus == 1:
        raise NotHere("this node has one GPU, and NCCL refuses two ranks on it")
    small = subject.small
    once, twice = (_done(small, count, rank_work.first_logprobs, rank_work.batch(small)) for count in (1, 2))
    return _same(small, max(float(abs(logprobs - once[0]).max()) for logprobs in twice))


def _done(subject: Subject, count: int, work: Callable[..., Any], *arguments: Any, **changes: Any) -> list[Any]:
    """The results of ranks that are started for this work alone."""
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
    """On a GPU what torch held at most in a step; on CPUs the same step on tensors without data, because a process
    there also holds what no plan counts."""
    spec, tokens = subject.spec, int(rank_work.batch(subject).lengths.max())
    if subject.gpus:
        spec, held = _changed(spec, ranks=len(up(subject).about)), subject.results["held_bytes"]
    else:
        rows = max(spec.learner.pass_tokens // tokens, 1)
        tokens, held = rows * tokens, _rehearsed(subject, rows, tokens)
    phases = planned(spec, subject.asked.shape, subject.kind, tokens)[KIND.name]
    measured = {"held_gib": held / GIB, "planned_gib": phases["learn"] / GIB, "share": held / phases["learn"]}
    if measured["share"] > PEAK_OVER_PLAN:
        raise Wrong("a step holds more than its plan", **measured)
    return measured


def _rehearsed(subject: Subject, rows: int, tokens: int) -> int:
    """The bytes of a rehearsed step, found in a process without a process group."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        arguments = (subject.spec.model.path, subject.spec.learner, rows, tokens)
        return pool.apply_async(rank_work.rehearsed_peak, arguments).get(subject.spec.timeouts.start_s)


@check("offload", "leave learner.offload at false, and report it with this file", gpus=1)
def offload(subject: Subject) -> Measured:
    """A step of the bundled model with master weights and optimiser in the host's memory."""
    small = subject.small
    metrics, seconds, held = _done(small, 1, rank_work.learn, rank_work.batch(small), offload=True)[0]
    measured = {"step_s": seconds, "held_gib": held / GIB}
    if not math.isfinite(metrics["gradient_norm"]):
        raise Wrong("the gradient is not finite", **measured)
    return measured


@check("collectives", "check NVLink (`nvidia-smi topo -m`), and NCCL_DEBUG=INFO for what NCCL chose", gpus=2)
def collectives(subject: Subject) -> Measured:
    """NCCL's all-reduce among the GPUs of this node, in GB/s as nccl-tests count the bus."""
    rates = _done(subject.small, subject.gpus, rank_work.all_reduce_rate)
    return {"all_reduce_gb_per_s": min(rates), "gpus": subject.gpus}
