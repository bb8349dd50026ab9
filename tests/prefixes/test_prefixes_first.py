"""Which prefixes an actor computes first."""

from rlhfless.prefixes.precompute import BLOCK_TOKENS, LEAST_TOKENS, to_precompute

SYSTEM = tuple(range(LEAST_TOKENS + BLOCK_TOKENS + 3))
"""A block and three tokens more than the shortest that is computed first."""
SHOTS = tuple(range(5000, 5000 + LEAST_TOKENS + 2 * BLOCK_TOKENS))


def test_the_prefix_of_several_prompts_in_whole_blocks() -> None:
    prompts = [(*SYSTEM, 7001), (*SYSTEM, 7002), (*SYSTEM[:10], 7003)]
    assert to_precompute(prompts) == [SYSTEM[: LEAST_TOKENS + BLOCK_TOKENS]]


def test_a_longer_prefix_comes_after_the_shorter() -> None:
    few = (*SYSTEM[: LEAST_TOKENS + BLOCK_TOKENS], *SHOTS)
    prompts = [(*few, 7001), (*few, 7002), (*SYSTEM, 7003)]
    first, second = to_precompute(prompts)
    assert first == SYSTEM[: LEAST_TOKENS + BLOCK_TOKENS]
    assert second == few


def test_little_more_than_the_shorter_is_left_to_the_engine() -> None:
    few = (*SYSTEM[: LEAST_TOKENS + BLOCK_TOKENS], *SHOTS[: LEAST_TOKENS - 1])
    prompts = [(*few, 7001), (*few, 7002), (*SYSTEM, 7003)]
    assert to_precompute(prompts) == [SYSTEM[: LEAST_TOKENS + BLOCK_TOKENS]]


def test_one_group_and_short_prefixes_are_left_to_the_engine() -> None:
    assert to_precompute([SYSTEM]) == []
    assert to_precompute([(*SYSTEM[:100], 7001), (*SYSTEM[:100], 7002)]) == []
    assert to_precompute([]) == []
