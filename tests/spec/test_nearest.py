"""The word that a mistyped one stands for."""

from __future__ import annotations

import pytest

from rlhfless.spec.explain import closest, nearest

ALGORITHMS = ["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "sapo", "ppo", "reinforce_plus_plus"]


@pytest.mark.parametrize(
    ("typed", "valid", "wanted"),
    [
        ("gpro", ["gspo", *ALGORITHMS], "grpo"),  # a swap is one typing error; gspo would be two
        ("gsop", ["grpo", *ALGORITHMS], "gspo"),
        ("pop", ALGORITHMS, "ppo"),
        ("rlo", ALGORITHMS, "rloo"),
        ("sap0", ALGORITHMS, "sapo"),
        ("GRPO", ["gspo", "grpo"], "grpo"),
        ("dr-grpo", ["grpo", "dr_grpo"], "dr_grpo"),
        ("reinforce++", ALGORITHMS, "reinforce_plus_plus"),
        ("fromat", ["format", "format_regex"], "format"),
        ("h010", ["h200", "h100"], "h100"),
        ("reward_maen", ["reward_greedy", "reward_mean"], "reward_mean"),
        ("exact", ["exact_match", "regex"], "exact_match"),  # the start of a word, and no typing error
        ("laerning_rate", ["learning_rate", "learning_rate_schedule"], "learning_rate"),
        ("xyz", ["abc"], None),
        ("", ["abc"], None),
        ("a", ["b"], None),
    ],
)
def test_the_closest_is_the_one_with_the_fewest_typing_errors(typed: str, valid: list[str], wanted: str) -> None:
    assert closest(typed, valid) == wanted
    assert nearest(typed, valid) == (f"did you mean `{wanted}`? " if wanted else "")
