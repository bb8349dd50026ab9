"""What a step draws beyond what it learns, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhfless.prediction.simulated import Drawn, signal_of
from rlhfless.spec import RunSpec


def spec_of(**algorithm: Any) -> RunSpec:
    values = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    return RunSpec.model_validate(values | {"prompts_per_step": 60, "samples_per_prompt": 4, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("algorithm", "signal", "expected"),
    [
        ({"type": "grpo"}, 0.5, Drawn(60, 4, 1.0)),
        ({"type": "grpo", "leave_out_without_signal": True}, 0.75, Drawn(60, 4, 0.75)),
        ({"type": "grpo", "leave_out_without_signal": True}, None, Drawn(60, 4, 1.0)),
        ({"type": "dapo"}, 0.75, Drawn(80, 4, 0.75)),
        ({"type": "dapo", "max_redraws": 1}, 0.25, Drawn(120, 4, 0.25)),
        ({"type": "dapo"}, None, Drawn(60, 4, 1.0)),
    ],
)
def test_samples_of_a_step(algorithm: dict[str, Any], signal: float | None, expected: Drawn) -> None:
    assert Drawn.of(spec_of(**algorithm), signal) == expected


def test_samples_that_are_learned() -> None:
    assert Drawn.of(spec_of(type="dapo"), 0.75).learned_samples == 240, "as many as without redraws"
    assert Drawn.of(spec_of(type="dapo", max_redraws=1), 0.25).learned_samples == 120, "half of the prompts"
    assert Drawn.of(spec_of(type="grpo", leave_out_without_signal=True), 0.0).learned_samples == 4, "one group"


def test_the_share_with_a_signal_is_the_mean_over_steps() -> None:
    steps = [SimpleNamespace(metrics={"groups_without_signal": share}) for share in (0.25, 0.5)]
    assert signal_of(cast("Any", SimpleNamespace(steps=steps))) == 0.625
    assert signal_of(cast("Any", SimpleNamespace(steps=[SimpleNamespace(metrics={})]))) is None
    assert signal_of(None) is None
