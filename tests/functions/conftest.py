"""A small random model, a ragged batch, and learners of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fakes.tiny_learner import make_batch, make_rank, make_shared_batch, save_tiny_experts, save_tiny_model
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.learner.rank import LearnerRank


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a small random model with its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory) -> str:
    """Folder of a small random model with eight experts a layer."""
    return save_tiny_experts(tmp_path_factory.mktemp("models") / "experts")


@pytest.fixture(scope="session")
def batch() -> PackedBatch:
    return make_batch()


@pytest.fixture(scope="session")
def shared_batch() -> PackedBatch:
    return make_shared_batch()


@pytest.fixture
def learner(tiny_model, tmp_path) -> Callable[..., Any]:
    """`with learner(**changes) as rank`: a learner of one rank, which leaves its process group at the end."""
    count = 0

    @contextmanager
    def start(model: str = tiny_model, **changes: Any) -> Iterator[LearnerRank]:
        nonlocal count
        count += 1
        rank = make_rank(model, tmp_path / f"rendezvous{count}", **changes)
        try:
            yield rank
        finally:
            rank.close()

    return start
