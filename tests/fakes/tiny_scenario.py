"""A scenario of seconds: two devices, a small model, a handful of prompts."""

from __future__ import annotations

from typing import Any

from rlhfless.sim.scenarios import Scenario

CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 32000,
}

POLICIES: list[dict[str, Any]] = [
    {"name": "static_colocated"},
    {"name": "static_disaggregated"},
    {"name": "best_static"},
    {"name": "clairvoyant"},
]


def values(**changes: Any) -> dict[str, Any]:
    """The scenario as a file would have it."""
    return {
        "name": "tiny",
        "cluster": {"machines": [{"kind": "l40s", "devices_per_node": 2}]},
        "model": {"config": CONFIG},
        "workload": {
            "type": "lognormal",
            "lengths": {"median_tokens": 60, "spread": 0.5, "persistence": 0.8},
            "prompts": 8,
            "median_prompt_tokens": 20,
            "source": "made up",
        },
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_tokens": 256,
        "steps": 4,
        "seeds": 2,
        "policies": POLICIES,
        **changes,
    }


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate(values(**changes))
