"""Groups of made-up rollouts, and a batch of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlhfless.records import FinishReason, Group, Prompt, Rollout

MakeGroup = Callable[[str, tuple[int, ...], list[list[int]]], Group]


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    """(prompt id, prompt tokens, responses) -> group; the logprob of token k is -k / 100."""

    def make(prompt_id: str, prompt_tokens: tuple[int, ...], responses: list[list[int]]) -> Group:
        rollouts = tuple(
            Rollout(
                prompt_id=prompt_id,
                sample_index=index,
                seed=index,
                token_ids=np.array(tokens, dtype=np.int64),
                logprobs=-np.array(tokens, dtype=np.float32) / 100,
                text="",
                finish_reason=FinishReason.STOP,
                version_spans=(),
                actor="a",
                started_s=0.0,
                finished_s=1.0,
            )
            for index, tokens in enumerate(responses)
        )
        return Group.of(Prompt(prompt_id, prompt_tokens, ""), rollouts)

    return make
