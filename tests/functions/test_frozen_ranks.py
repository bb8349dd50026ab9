"""Reference and reward model that are split over ranks: they give what one rank gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from fakes.builders import LONG
from fakes.tiny_learner import PATIENCE_S, Work, compute_in_float64, run_processes, save_tiny_model
from rlhfless.algorithms.batch import select
from rlhfless.functions.base import RankPlace
from rlhfless.functions.per_token import PerTokenSettings
from rlhfless.functions.scoring.reward_model import RewardModel
from rlhfless.functions.sharding import join_frozen
from rlhfless.functions.shares import FrozenPolicy
from rlhfless.records import FinishReason
from rlhfless.rewards import Failed, RewardSample
from rlhfless.spec import ModelSpec, RewardModelSpec

pytestmark = pytest.mark.timeout(600)


def _process(rendezvous: Path, rank: int, ranks: int, work: Work, given: Mapping, queue) -> None:
    compute_in_float64()
    try:
        queue.put((rank, work(join_frozen(RankPlace(rank, ranks, f"file://{rendezvous}", PATIENCE_S)), **given)))
    except Exception as error:  # the test looks at it
        queue.put((rank, error))


def run(work: Work, folder: Path, ranks: int, **given: Any) -> list[Any]:
    """The results of all ranks, by rank, in float64."""
    return run_processes(_process, folder, ranks, work, given)


def refer(mesh: Any, model: str, batches: list, share_prefixes: bool) -> list:
    settings = PerTokenSettings(
        run_id="run",
        lease=LONG,
        function="reference",
        worker="",
        model=ModelSpec(path=model),
        dtype="float32",  # is float64 here
        micro_batch_tokens=64,
        share_prefixes=share_prefixes,
        temperature=0.8,
        rank_bindings=(),
        call_timeout_s=60,
    )
    reference = FrozenPolicy(settings, threads=1, mesh=mesh)
    return [reference.compute(batch) for batch in batches]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def test_a_reference_of_two_ranks_is_that_of_one_to_1e9(batch, shared_batch, tmp_path, tied):
    """Of two batches, one of which shares prefixes, and of one sequence, with which a rank has no work."""
    model = save_tiny_model(tmp_path / "model", tied=tied)
    given = {"model": model, "batches": [batch, shared_batch, select(batch, np.arange(1))]}
    (one,) = run(refer, tmp_path, 1, share_prefixes=False, **given)
    both = run(refer, tmp_path, 2, share_prefixes=True, **given)
    for rank in both:
        for (mine, _), (theirs, _) in zip(one, rank, strict=True):
            assert theirs.dtype == np.float64
            np.testing.assert_allclose(theirs, mine, atol=1e-9, rtol=0)
    assert np.count_nonzero(one[0][0])


def test_the_logprobs_of_a_group_do_not_depend_on_what_came_with_it(batch, tmp_path):
    model = save_tiny_model(tmp_path / "model")
    groups = [np.flatnonzero(batch.sequence_groups == group) for group in range(6)]
    given = {"model": model, "batches": [batch, *(select(batch, group) for group in groups)]}
    (((together, _), *alone),) = run(refer, tmp_path, 1, share_prefixes=True, **given)
    for sequences, (logprobs, _) in zip(groups, alone, strict=True):
        assert np.array_equal(logprobs, together[np.isin(batch.sequence_id, sequences)]), sequences


def save_reward_model(folder: Path) -> str:
    """Of the tiny policy's sizes and tokenizer."""
    policy = save_tiny_model(folder / "policy")
    torch.manual_seed(1)
    config = Qwen3Config.from_pretrained(policy, num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(folder / "rewards")
    tokenizer = AutoTokenizer.from_pretrained(policy, pad_token="w0")
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save_pretrained(folder / "rewards")
    return str(folder / "rewards")


def score(mesh: Any, path: str, samples: list[RewardSample]) -> dict:
    spec = RewardModelSpec(type="reward_model", path=path, dtype="float32", micro_batch_tokens=24)
    model = RewardModel(spec, threads=1, mesh=mesh)
    return model.share(samples) | {"again": model.share(samples[:1])}


def sample(words: int) -> RewardSample:
    text = " ".join(f"w{1 + (7 * words + index) % 30}" for index in range(words))
    return RewardSample("", text, words, FinishReason.STOP, {})


def test_a_reward_model_of_two_ranks_scores_as_one_to_1e9(tmp_path):
    """Of sequences of many lengths and one that is empty; and then of a single one, with which a rank has no work."""
    path = save_reward_model(tmp_path)
    given = {"path": path, "samples": [sample(words) for words in (9, 30, 1, 0, 4, 17, 2)]}
    (one,) = run(score, tmp_path, 1, **given)
    first, second = run(score, tmp_path, 2, **given)
    assert isinstance(one[3], Failed)
    assert first[3] == second[3] == one[3]
    assert (first.keys() & second.keys()) == {3, "again"}
    again = first.pop("again") | second.pop("again")
    assert again == pytest.approx(one.pop("again"), abs=1e-9)
    both = first | second
    assert both.keys() == one.keys()
    for index in one.keys() - {3}:
        assert both[index] == pytest.approx(one[index], abs=1e-9)
