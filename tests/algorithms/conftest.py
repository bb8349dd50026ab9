"""Groups of made-up rollouts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fakes.builders import drawn
from rlhfless.records import Group, Prompt

MakeGroup = Callable[[str, tuple[int, ...], list[list[int]]], Group]


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    """(prompt id, prompt tokens, responses) -> group; the logprob of token k is -k / 100."""

    def make(prompt_id: str, prompt_tokens: tuple[int, ...], responses: list[list[int]]) -> Group:
        rollouts = tuple(
            drawn(prompt_id, index, tokens, -np.array(tokens, np.float32) / 100, seed=index)
            for index, tokens in enumerate(responses)
        )
        return Group.of(Prompt(prompt_id, prompt_tokens, ""), rollouts)

    return make
