"""An algorithm of one's own, named by import path: its keys, its numbers by hand, and what the learner does with it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.builders import drawn
from fakes.tiny_learner import make_batch, make_rank, save_tiny_model
from rlhfless.algorithms.base import LossInputs, algorithm_of
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.passes import Passes
from rlhfless.records import FunctionName, Group, Prompt, Score
from rlhfless.scaling.function_specs import kinds_of
from rlhfless.spec.errors import SpecError
from rlhfless.spec.load import load_spec

TEMPERATURE = 0.8


def group(name: str, rewards: list[float]) -> Group:
    """A prompt of one token and responses of two."""
    rollouts = [drawn(name, index, [1, 2], [-1, -1]) for index in range(len(rewards))]
    return Group.of(Prompt(name, (3,), ""), rollouts).adding(score=[Score(reward, {}) for reward in rewards])


def test_its_keys_are_read_and_checked(own: Path) -> None:
    algorithm = load_spec("run.yaml").algorithm
    assert algorithm.model_dump() == {"type": "leave_one_out:LeaveOneOut", "max_advantage": 2.0}
    with pytest.raises(SpecError, match=r"algorithm\.max_advantage .*greater than 0"):
        load_spec("run.yaml", ["algorithm.max_advantage=0"])
    with pytest.raises(SpecError, match=r"algorithm\.clip_low .*unknown key"):
        load_spec("run.yaml", ["algorithm.clip_low=0.1"])
    with pytest.raises(SpecError, match="did you mean `LeaveOneOut`"):
        load_spec("run.yaml", ["algorithm.type=leave_one_out:LeaveOneOff"])
    with pytest.raises(SpecError, match=r"samples_per_prompt is 1.*set it to 2 or more"):
        load_spec("run.yaml", ["samples_per_prompt=1"])


def test_a_run_places_only_what_it_needs(own: Path) -> None:
    assert FunctionName.REFERENCE not in [kind.name for kind in kinds_of(load_spec("run.yaml"))]


def test_advantages_and_loss_by_hand(own: Path) -> None:
    algorithm = algorithm_of(load_spec("run.yaml").algorithm)
    batch = pack([group("a", [1.0, 2.0, 6.0]), group("b", [4.0])])
    # 1 - 4, 2 - 3.5, 6 - 1.5, each cut to 2; and a sample without others.
    expected = [-2, -1.5, 2, 0]
    advantages = algorithm.advantages(batch)
    assert advantages.tolist() == [value for each in expected for value in (0, each, each)]
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -3.0], requires_grad=True),
        entropy=torch.zeros(2),
        rollout_logprobs=torch.zeros(2),
        advantages=torch.tensor([2.0, -1.0]),
        denominator_tokens=4,
        sequence_id=torch.zeros(2, dtype=torch.int64),
        denominator_sequences=2,
    )
    outputs = algorithm.loss(inputs)
    assert outputs.loss.item() == -(2 * -1 + -1 * -3) / 4
    assert outputs.metrics["algorithm/logprob"].item() == -1


def plain(model_path: str, batch: PackedBatch) -> tuple[float, float]:
    """The loss and the norm of its gradient, sequence by sequence, on the model as transformers has it."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert batch.advantages is not None
    loss = torch.zeros(())
    for index in range(batch.sequences):
        mine = batch.sequence_id == index
        tokens = torch.from_numpy(batch.tokens[mine])
        logits = model(input_ids=tokens[None, :-1]).logits[0] / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        loss = loss - (torch.from_numpy(batch.advantages[mine])[1:] * logprobs).sum() / batch.denominators.tokens
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]).norm()
    return loss.item(), norm.item()


def test_the_learner_takes_its_step(own: Path, tmp_path: Path) -> None:
    model, settings = save_tiny_model(tmp_path / "model"), load_spec("run.yaml").algorithm
    batch = make_batch()
    batch = batch.with_columns(rewards=np.random.default_rng(0).standard_normal(batch.sequences))
    batch = batch.with_columns(advantages=algorithm_of(settings).advantages(batch))
    rank = make_rank(model, tmp_path / "rendezvous", algorithm=settings, micro_batch_tokens=64, temperature=TEMPERATURE)
    try:
        metrics = rank.learn(batch, Passes())
    finally:
        rank.close()
    loss, norm = plain(model, batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["algorithm/logprob"] < 0
    # Every algorithm has it.
    assert {"entropy", "rollout_logprob_difference", "rollout_logprob_difference_max"} <= metrics.keys()


SCRIPT = """
import pickle, sys
import torch
settings, inputs = pickle.load(open(sys.argv[1], "rb"))
from rlhfless.algorithms.base import algorithm_of
print(type(settings).__module__, algorithm_of(settings).loss(inputs).loss.item())
"""


def test_another_process_has_it_without_knowing_of_it_before(own: Path, tmp_path: Path) -> None:
    """As a learner rank gets it: in a process of its own, in another folder, from a pickle."""
    ones = torch.ones(2)
    inputs = LossInputs(
        -ones, ones, ones, ones, 2, sequence_id=torch.zeros(2, dtype=torch.int64), denominator_sequences=1
    )
    file = tmp_path / "rank.pickle"
    file.write_bytes(pickle.dumps((load_spec("run.yaml").algorithm, inputs)))
    command = [sys.executable, "-c", SCRIPT, str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "leave_one_out 1.0\n"
