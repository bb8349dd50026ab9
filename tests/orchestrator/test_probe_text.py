"""The text on which engine and learner are compared."""

import pytest

from rlhfless.orchestrator.launch import PROBE_PROMPTS, PROBE_TOKENS, probe_text
from rlhfless.records import Prompt


def prompts(*token_ids: tuple[int, ...]) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"p{i}", tokens, "") for i, tokens in enumerate(token_ids))


@pytest.mark.parametrize("data", [((7,),), ((7,), (8,)), ((1, 2, 3),) * 4])
def test_few_and_short_prompts_are_repeated(data: tuple[tuple[int, ...], ...]) -> None:
    """A data set with a single prompt of one token used to prevent the start of a run."""
    text = probe_text(prompts(*data), 10_000)
    assert len(text) == PROBE_TOKENS
    assert set(text) == {token for tokens in data for token in tokens}


def test_the_probe_covers_the_ends_of_many_prompts() -> None:
    """All start alike, as with a system prompt of 100 tokens, and end with their number."""
    text = probe_text(prompts(*((0,) * 100 + (i,) * 4 for i in range(1, 1001))), 10_000)
    assert len(text) == PROBE_TOKENS
    numbers = set(text) - {0}
    assert len(numbers) == PROBE_PROMPTS
    assert max(numbers) - min(numbers) > 500  # from all over the data set


def test_the_probe_fits_the_context() -> None:
    assert len(probe_text(prompts((1, 2, 3)), 5)) == 5
