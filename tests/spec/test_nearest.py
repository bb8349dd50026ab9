"""The word that a mistyped one stands for, and the name that one with wrong characters becomes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlhfless.spec import RunSpec
from rlhfless.spec.explain import closest, explain, nearest

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


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gsm8k-qwen2.5", "did you mean `gsm8k-qwen2-5`?"), ("My Run", "did you mean `my-run`?"), ("---", "")],
)
def test_a_name_with_wrong_characters_gets_one_with_right_ones(name: str, hint: str) -> None:
    values = {"name": name, "model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    with pytest.raises(ValidationError) as error:
        RunSpec.model_validate(values)
    (problem,) = explain(error.value, RunSpec, {}, values)
    assert (problem.where, problem.hint) == ("name", hint)
    assert problem.what.startswith(repr(name))
