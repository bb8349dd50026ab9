"""On-policy distillation: the advantage of a token from its logprobs under teachers.

The policy generates, and frozen teachers compute the logprobs of its tokens. With the student's logprob s of a token,
and t_k of each teacher k of its prompt with weight w_k,

    advantage = coefficient * sum over k of w_k (t_k - s)

t_k - s is a sample of -KL(student || teacher), the reverse KL divergence, so the policy gradient with this advantage
descends it, without looking ahead to later tokens. The term is added to the advantage of any algorithm; `distill` has
no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhfless.algorithms.batch import BoolArray, PackedBatch
from rlhfless.algorithms.losses import ClippedLoss
from rlhfless.records import FloatArray
from rlhfless.spec import AlgorithmSpec, DistillSpec, DistillTermSpec, TeacherSpec


class Distill(ClippedLoss[DistillSpec]):
    """Distillation alone: PPO's loss, with no advantage but that of `distillation`."""

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Return zeros, `[tokens]`."""
        return np.zeros(len(batch.tokens), dtype=np.float32)


def distillation(settings: AlgorithmSpec, batch: PackedBatch) -> FloatArray | float:
    """Return the distillation term of the advantages, `[tokens]`; 0 for an algorithm without one.

    Raises ValueError if logprobs of the student or of teachers are missing.
    """
    term = getattr(settings, "distill", None)
    if not isinstance(term, DistillTermSpec) or not term.on:
        return 0.0
    student = batch.old_logprobs if term.student == "old" else batch.rollout_logprobs
    if batch.teacher_logprobs is None or batch.teacher_weight is None or student is None:
        name = "old" if student is None else "teacher"
        raise ValueError(f"distillation needs {name} logprobs, and the batch has none")
    return np.float32(term.coefficient) * (batch.teacher_logprobs - batch.teacher_weight * student)


def with_teachers(batch: PackedBatch, teachers: Sequence[TeacherSpec], sources: Sequence[str]) -> PackedBatch:
    """Replace each teacher's column by `teacher_logprobs` and `teacher_weight`. `sources`: the set of each sequence."""
    logprobs, weight = np.zeros((2, len(batch.tokens)), dtype=np.float32)
    for teacher in teachers:
        taught = taught_tokens(batch, teacher, sources)
        logprobs[taught] += np.float32(teacher.weight) * _outputs(batch, teacher)[taught, 0]
        weight[taught] += np.float32(teacher.weight)
    names = {teacher.function for teacher in teachers}
    rest = {name: values for name, values in batch.own.items() if name not in names}
    return dataclasses.replace(batch, own=rest).with_columns(teacher_logprobs=logprobs, teacher_weight=weight)


def taught_tokens(batch: PackedBatch, teacher: TeacherSpec, sources: Sequence[str]) -> BoolArray:
    """Return which generated tokens have this teacher, `[tokens]`."""
    taught: BoolArray = np.array([teacher.teaches(source) for source in sources])
    return batch.response_mask & taught[batch.sequence_id]


def _outputs(batch: PackedBatch, teacher: TeacherSpec) -> FloatArray:
    """Return a teacher's logprobs and, if it computes them, entropies: `[tokens, 1 or 2]`."""
    return batch.own[teacher.function].reshape(len(batch.tokens), -1)


def teacher_metrics(batch: PackedBatch, teachers: Sequence[TeacherSpec], sources: Sequence[str]) -> dict[str, float]:
    """Return the metrics of each teacher with tokens, as means over its tokens. `batch` has the teachers' columns.

    s are the old logprobs if the batch has them. `reverse_kl` is the mean of s - t, an estimate of
    KL(student || teacher). `teacher_agreement` is the mean of min(1, e^(t - s)), an estimate of the overlap of the two
    distributions: 1 if they are equal, 1 less their total variation distance otherwise, as in the acceptance of drafts
    (arXiv 2211.17192, section 3.5). `teacher_cross_entropy` is the mean of -t, the student's entropy plus the reverse
    KL. `teacher_entropy` is exact: a server computes none.
    """
    metrics: dict[str, float] = {}
    student = (batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs).astype(np.float64)
    for teacher in teachers:
        taught = taught_tokens(batch, teacher, sources)
        if not taught.any():
            continue
        logprobs, *entropies = _outputs(batch, teacher)[taught].T.astype(np.float64)
        difference = logprobs - student[taught]
        metrics |= {
            f"reverse_kl/{teacher.name}": -float(difference.mean()),
            f"teacher_agreement/{teacher.name}": float(np.exp(np.minimum(difference, 0)).mean()),
            f"teacher_cross_entropy/{teacher.name}": -float(logprobs.mean()),
            **{f"teacher_entropy/{teacher.name}": float(each.mean()) for each in entropies},
        }
    return metrics
