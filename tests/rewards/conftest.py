"""Rewards with their worker processes, which are gone after each test."""

import pytest
import pytest_asyncio

from rlhfless.rewards import Rewards
from rlhfless.spec import ScoringSpec


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Writes a module of the user's, under a name of its own, and gives that name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        name = f"user_module_{abs(hash(request.node.nodeid))}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest_asyncio.fixture
async def scored():
    """Scores samples with real workers: one, unless the test asks for more."""
    made = []

    async def score(specs, samples, **scoring):
        rewards = Rewards(specs, ScoringSpec(**{"workers": 1, **scoring}))
        made.append(rewards)
        return await rewards.score(samples)

    yield score
    for rewards in made:
        rewards.close()
