"""What the spec says of a replica between two uses."""

from __future__ import annotations

import pytest

from rlhfless.scaling.function_specs import Bounds, held
from rlhfless.spec import RunSpec

SMALL = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}


@pytest.mark.parametrize(
    ("hold", "tenants", "fewest", "idle"),
    [
        ("auto", 1, 0, True),
        ("always", 1, 1, True),
        ("never", 1, 0, False),
        ("auto", 2, 1, True),  # asleep it costs nothing
        ("never", 2, 0, False),
    ],
)
def test_a_function_between_two_uses(hold: str, tenants: int, fewest: int, idle: bool) -> None:
    spec = RunSpec.model_validate(SMALL | {"scaling": {"hold_scoring": hold}, "placement": {"tenants": tenants}})
    bounds: Bounds = held(spec, "hold_scoring")
    assert (bounds.fewest, bounds.idle) == (fewest, idle)
    assert bounds.reason
