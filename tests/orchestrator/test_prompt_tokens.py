"""Computed and unique prompt tokens of functions, worked by hand."""

import pytest

from fakes.builders import drawn
from rlhfless.orchestrator.step_metrics import TokenCounts, draft_metrics, prompt_token_metrics
from rlhfless.records import Experience, FunctionName, Group, Invocation, Prompt, Work
from rlhfless.telemetry.metrics import METRICS


def group(name: str, prompt: tuple[int, ...], responses: tuple[int, ...]) -> Group:
    return Group.of(Prompt(name, prompt, ""), [drawn(name, i, range(n)) for i, n in enumerate(responses)])


def call(function: FunctionName, work: Work, given: int, cached: int, evicted: int = 0) -> Invocation:
    tokens = {"input_tokens": given, "cached_tokens": cached, "evicted_tokens": evicted}
    return Invocation(function, "r", "i", work, 1, 0.0, 1.0, **tokens)


def test_by_hand() -> None:
    # Two samples each; the prompts share their first three tokens.
    first, second = group("a", (1, 2, 3, 4), (5, 6)), group("b", (1, 2, 3, 9, 9), (7, 0))
    drawn, kept = Experience((first, second)), Experience((first,))
    calls = [
        call(FunctionName.GENERATION, Work.GENERATE, 8, 4),
        call(FunctionName.GENERATION, Work.GENERATE, 10, 5, 2),
        call(FunctionName.GENERATION, Work.HELD_OUT, 100, 0),
        call(FunctionName.REFERENCE, Work.LOGPROBS, 18 + 18, 9),
        call(FunctionName.LEARNER, Work.EVALUATE, 50, 0),
        call(FunctionName.LEARNER, Work.LEARN, 2 * (8 + 11), 4),
    ]
    assert prompt_token_metrics(
        calls, TokenCounts.of(drawn), TokenCounts.of(kept), {FunctionName.LEARNER: 2}.__getitem__
    ) == {
        "prefix_tokens_evicted": 2.0,
        "prompt_tokens_computed/generation": 9.0,
        "prompt_tokens_unique/generation": 3.0 + 1 + 2,
        "prompt_tokens_computed/reference": 9.0,
        "prompt_tokens_unique/reference": 6.0,
        "prompt_tokens_computed/learner": 2 * 8 - 4.0,  # of two passes,
        "prompt_tokens_unique/learner": 2 * 4.0,
    }


@pytest.mark.parametrize("calls", [[], [call(FunctionName.SCORING, Work.SCORE, 3, 0)]])
def test_functions_without_a_call(calls: list[Invocation]) -> None:
    one = TokenCounts.of(Experience((group("a", (1,), (2,)),)))
    assert prompt_token_metrics(calls, one, one, lambda _: 1) == {}


def test_drafts_of_all_actors_of_a_step() -> None:
    """Two actors, one of which drafts deeper; 6 + 2 drafts at the first position, of which 3 + 1 were accepted."""
    calls = [
        Invocation(
            "generation",
            "a",
            "i",
            Work.GENERATE,
            1,
            0.0,
            1.0,
            drafted=(6, 4, 1),
            accepted=(3, 1, 1),
            draft_s=0.125,
            verify_s=0.5,
        ),
        Invocation("generation", "b", "i", Work.GENERATE, 1, 0.0, 1.0, drafted=(2,), accepted=(1,), verify_s=0.25),
        Invocation("learner", "l", "i", Work.LEARN, 1, 0.0, 1.0),
    ]
    assert draft_metrics(calls) == {
        "drafted_tokens": 13.0,
        "accepted_tokens": 6.0,
        "draft_s": 0.125,
        "verify_s": 0.75,
        "draft_acceptance/1": 0.5,
        "draft_acceptance/2": 0.25,
        "draft_acceptance/3": 1.0,
    }
    assert {name.partition("/")[0] for name in draft_metrics(calls)} <= METRICS.keys()
    assert draft_metrics(calls[2:]) == {}
