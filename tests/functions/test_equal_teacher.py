"""A teacher equal to the student moves no weight; another one draws the student nearer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from fakes.builders import drawn
from fakes.tiny_learner import make_batch, make_frozen, make_rank, make_shared_batch, save_tiny_model
from rlhfless.algorithms.base import algorithm_of
from rlhfless.algorithms.batch import pack
from rlhfless.algorithms.distill import distillation, teacher_metrics, with_teachers
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.per_token import PerTokenWorker
from rlhfless.functions.shares import FrozenTeacher
from rlhfless.records import Group, Prompt
from rlhfless.spec import AdamWSpec, DistillSpec, TeacherSpec


def test_equal_models_have_equal_logprobs_and_weights_stay(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    learner = make_rank(
        model,
        tmp_path / "rendezvous",
        algorithm=DistillSpec(),
        micro_batch_tokens=64,
        optimizer=AdamWSpec(learning_rate=1e-3, weight_decay=0),
    )
    teacher = make_frozen(model)
    with closing(learner):
        check_nothing_moves(learner, teacher, model)


def check_nothing_moves(learner: LearnerRank, teacher: PerTokenWorker, model: str) -> None:
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


def test_a_teacher_computes_the_entropies_beside_the_same_logprobs(tmp_path: Path) -> None:
    model, batch = save_tiny_model(tmp_path / "model"), make_batch()
    both = make_frozen(model, worker=FrozenTeacher).compute(batch)[0]
    np.testing.assert_array_equal(both[:, 0], make_frozen(model).compute(batch)[0])
    plain: Any = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        part = slice(start, start + length)
        with torch.no_grad():
            logits = plain(torch.from_numpy(batch.tokens[part])[None]).logits[0, :-1] / 0.8
        entropies = np.append(0, torch.distributions.Categorical(logits=logits).entropy().numpy())
        expected = np.where(batch.response_mask[part], entropies, 0)
        np.testing.assert_allclose(both[part, 1], expected, atol=1e-5)


def test_a_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    """Forty steps of its own samples reduce the reverse KL divergence to less than half."""
    student, other = save_tiny_model(tmp_path / "student"), tmp_path / "teacher"
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(student, initializer_range=0.1)
    teacher_model: Any = Qwen3ForCausalLM(config)
    teacher_model.save_pretrained(other)
    teacher = make_frozen(str(other))
    algorithm = DistillSpec.model_validate({"distill": {"student": "rollout"}})
    optimizer = AdamWSpec(learning_rate=1e-2, weight_decay=0)
    learner = make_rank(student, tmp_path / "rendezvous", algorithm=algorithm, optimizer=optimizer)
    sampler: Any = Qwen3ForCausalLM.from_pretrained(student)
    named, found = TeacherSpec(name="same", path=str(other)), []
    with closing(learner):
        for step in range(40):
            batch = pack(sampled(sampler, torch.Generator().manual_seed(step)))
            batch = batch.with_columns(teacher_same=teacher.compute(batch)[0])
            sources = [""] * batch.sequences
            found.append(teacher_metrics(batch, [named], sources)["reverse_kl/same"])
            batch = with_teachers(batch, [named], sources)
            learner.learn(batch.with_columns(advantages=distillation(algorithm, batch)), Passes(1, 1, (0, step), 40))
            sampler.load_state_dict(learner.weights(), strict=False)  # its head is tied
    assert np.mean(found[-5:]) < np.mean(found[:5]) / 2


@torch.no_grad()
def sampled(model: Any, generator: torch.Generator) -> list[Group]:
    """Return eight groups of four responses of ten tokens, at temperature 0.8."""
    tokens = torch.arange(1, 9).repeat_interleave(4)[:, None]
    logprobs = []
    for _ in range(10):
        every = torch.log_softmax(model(input_ids=tokens).logits[:, -1].float() / 0.8, -1)
        drawn_next = torch.multinomial(every.exp(), 1, generator=generator)
        logprobs.append(every.gather(1, drawn_next))
        tokens = torch.cat([tokens, drawn_next], 1)
    values = torch.cat(logprobs, 1).numpy()
    return [
        Group.of(
            Prompt(f"p{group}", (group + 1,), ""),
            [
                drawn(f"p{group}", index, tokens[4 * group + index, 1:].numpy(), values[4 * group + index])
                for index in range(4)
            ],
        )
        for group in range(8)
    ]
