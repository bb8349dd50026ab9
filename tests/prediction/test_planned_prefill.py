"""Prompts computed apart, in the plan of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfless.planning.memory_plan import Question
from rlhfless.prediction.prefill import planned_prefill
from rlhfless.prediction.simulated import Lengths
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec import RunSpec

VALUES: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "p.jsonl"},
    "rewards": [{"type": "exact_match"}],
    "prompts_per_step": 16,
    "samples_per_prompt": 4,
}
SHAPE = ModelShape.of_config(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
)
FLAT = LinearEngine(1.0, 0.0, 0.0, 0.01, 0.0)
"""An iteration takes 1 s whatever is in it, and a prompt token 0.01 s."""


def question(actors: int, kind: str = "h100", **changes: Any) -> Question:
    scaling = {"generation": {"min_actors": actors, "max_actors": actors}}
    spec = RunSpec.model_validate(VALUES | {"scaling": scaling} | changes)
    return Question(spec, SHAPE, device_of(kind), actors, 2048, 0)


LONG_TAIL = Lengths(100.0, 130.0, 1.5, 800.0, "by hand", known=True)


def test_the_verdict_is_of_the_engines_and_the_lengths() -> None:
    """Two engines, 64 s of prompts for each in one pool: the longest part, of 999 tokens, waits for them. Apart it
    begins after 16 s, and two calls of a move take 0.05 s. Where no response is longer than 200 tokens, three parts are
    so long, and the third comes after 48 s."""
    found = planned_prefill(question(2), LONG_TAIL, FLAT)
    assert found is not None
    assert found.together_s == pytest.approx(64 + 999)
    assert found.apart_s == pytest.approx(16 + 999 + 0.05, abs=0.01)
    assert (found.engines, found.prefill_actors, found.connector, found.pays) == (2, 1, "nixl", False)
    shorter = planned_prefill(question(2, generation={"max_tokens": 200}), LONG_TAIL, FLAT)
    assert shorter is not None
    assert shorter.together_s == pytest.approx(64 + 200)
    assert shorter.apart_s == pytest.approx(48 + 200 + 0.05, abs=0.01)
    assert shorter.pays
    assert "1 of 2 actors, kv_connector nixl" in shorter.text
    assert shorter.text.endswith("248 s against 264 s in one pool, pays")
    assert found.text.endswith("does not pay")


def test_actors_that_prefill_are_engines_too() -> None:
    apart = {
        "scaling": {
            "generation": {"min_actors": 1, "max_actors": 1},
            "prefill": {"max_actors": 2, "kv_connector": "folder"},
        },
    }
    found = planned_prefill(question(1, "cpu-core", **apart), LONG_TAIL)
    assert found is not None
    assert (found.engines, found.connector) == (3, "folder")


def test_a_run_with_one_engine_has_nothing_to_compare() -> None:
    assert planned_prefill(question(1), LONG_TAIL) is None
    assert planned_prefill(question(2), replace(LONG_TAIL, spread=0.0)) is not None
