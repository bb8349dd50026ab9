"""A teacher equal to the student: advantages are exactly 0, and no weight moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fakes.builders import LONG
from fakes.tiny_learner import make_batch, make_rank, make_shared_batch, save_tiny_model
from rlhfless.algorithms.base import algorithm_of
from rlhfless.algorithms.distill import distillation, with_teachers
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.per_token import PerTokenSettings
from rlhfless.functions.shares import FrozenPolicy
from rlhfless.spec import AdamWSpec, DistillSpec, ModelSpec, TeacherSpec


def test_equal_models_have_equal_logprobs_and_weights_stay(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    learner = make_rank(
        model,
        tmp_path / "rendezvous",
        algorithm=DistillSpec(),
        micro_batch_tokens=64,
        optimizer=AdamWSpec(learning_rate=1e-3, weight_decay=0),
    )
    settings = PerTokenSettings(
        run_id="run",
        lease=LONG,
        function="teacher_same",
        worker="",
        model=ModelSpec(path=model),
        dtype="float32",
        micro_batch_tokens=64,
        share_prefixes=True,
        temperature=0.8,
        rank_bindings=(),
        call_timeout_s=60,
    )
    teacher = FrozenPolicy(settings, threads=1)
    before = [each.detach().clone() for each in learner._model.parameters()]
    for step, batch in enumerate((make_batch(), make_shared_batch())):
        old = learner.evaluate(batch)
        assert old[batch.response_mask].all()
        taught = batch.with_columns(teacher_same=teacher.compute(batch)[0], old_logprobs=old)
        sources = [""] * batch.sequences
        taught = with_teachers(taught, [TeacherSpec(name="same", path=model)], sources)
        advantages = algorithm_of(DistillSpec()).advantages(taught) + distillation(DistillSpec(), taught)
        np.testing.assert_array_equal(advantages, 0)
        metrics = learner.learn(taught.with_columns(advantages=advantages), Passes(2, 1, (0, step), 4))
        assert metrics["gradient_norm"] == 0
    for first, now in zip(before, learner._model.parameters(), strict=True):
        assert torch.equal(first, now)
