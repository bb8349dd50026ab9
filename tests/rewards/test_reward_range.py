"""A reward that is finite and absurd has failed, whatever kind it is of, and what is left can be learned from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.builders import samples_of
from rlhfless.algorithms.group_based import group_advantages
from rlhfless.rewards import Failed, combined
from rlhfless.rewards.protocol import MAX_REWARD, finite
from rlhfless.spec import PythonRewardSpec

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("value", "weight", "cause"),
    [
        (-1e308, 1.0, "'judge' gave -1e+308, beyond the range from -1e+09 to 1e+09"),
        (1.1e9, 0.5, "'judge' gave 1.1e+09, beyond the range from -1e+09 to 1e+09"),
        (2.0, 1e308, "'judge' gave 2 times its weight (1e+308), beyond the range from -1e+09 to 1e+09"),
        (1e9, -2.0, "'judge' gave 1e+09 times its weight (-2), beyond the range from -1e+09 to 1e+09"),
        (float("nan"), 1.0, "'judge' gave nan, beyond the range from -1e+09 to 1e+09"),
    ],
)
def test_a_value_beyond_the_range_is_a_failure_that_names_reward_value_and_range(
    value: float, weight: float, cause: str
) -> None:
    (score,) = combined({"judge": weight, "other": 2.0}, [[value], [3.0]], 1, "drop")
    assert (score.total, dict(score.parts), score.failures) == (6.0, {"other": 3.0}, {"judge": cause})
    (zero,) = combined({"judge": weight, "other": 2.0}, [[value], [3.0]], 1, "zero")
    assert dict(zero.parts) == {"judge": 0.0, "other": 3.0}


def test_the_range_itself_is_allowed() -> None:
    (score,) = combined({"judge": 1.0}, [[-MAX_REWARD]], 1, "drop")
    assert (score.total, score.failures) == (-MAX_REWARD, {})


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=8), st.integers(2, 6))
def test_what_passes_adds_up_and_its_advantages_can_be_squared_in_float32(
    parts: list[tuple[float, float]], samples: int
) -> None:
    weights = {f"r{number}": weight for number, (weight, _) in enumerate(parts)}
    columns = [[value / (sample + 1) for sample in range(samples)] for _, value in parts]
    scores = combined(weights, columns, samples, "zero")  # type: ignore[arg-type]
    rewards = np.array([score.total for score in scores])
    assert np.isfinite(rewards).all()
    for normalize_std in (False, True):
        advantages = group_advantages(rewards, np.zeros(samples, np.int64), normalize_std=normalize_std)
        assert np.isfinite(np.square(advantages).sum(dtype=np.float32))


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), None, "1", [1.0]])
def test_what_is_no_finite_float_is_none(value: object) -> None:
    assert finite(value) is None


async def test_a_python_reward_beyond_the_range_fails_on_its_samples_alone(module, scored):
    name = module("def score(response):\n    return float(response)")
    spec = PythonRewardSpec(type="python", name="judge", target=f"{name}:score")
    good, huge = await scored([spec], samples_of("1.5", "-1e308"))
    assert (good.total, good.failures) == (1.5, {})
    assert huge.failures == {"judge": "'judge' gave -1e+308, beyond the range from -1e+09 to 1e+09"}


def test_failed_parts_stay_failed() -> None:
    (score,) = combined({"judge": 1e308}, [[Failed("no answer")]], 1, "drop")
    assert score.failures == {"judge": "no answer"}
