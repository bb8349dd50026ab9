"""Is the right version really loaded? Three checks that are part of the product, as pure functions.

`consumed`: the digest of the tensors that a load took equals the version's, and none was left out. Finds wrong,
old or damaged bytes, and loaders that skip tensors.

`moved`: a perturbed version must change the probe's logprobs, and to the learner's. Done once per engine, at its
start. Finds engines that take all the bytes and go on serving from a packed copy of the old ones.

`probe`: after each load, the engine's logprobs of a short text equal the learner's. Finds all else: wrong layouts,
wrong dtype, another model.

The first proves the bytes, the last two the effect. A digest cannot see a stale copy; a probe cannot see an update
smaller than its tolerance. Hence all three.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.records import Probe, WeightVersion
from rlhfless.spec import DType
from rlhfless.weights.errors import WeightCheckFailed

__all__ = [
    "PROBE_TOLERANCE",
    "WeightCheckFailed",
    "check_consumed",
    "check_moved",
    "check_probe",
    "largest_difference",
]

# Engine and learner compute the same function with other kernels, so in another order. What that makes of a
# 4-layer model with logits of size 10 was measured: 5e-6, 0.07 and 0.013 at most over 4 x 63 tokens (the last two
# are the ratio of the mantissas, 7 and 10 bits). The tolerances leave room for deeper models, and stay below
# what a stale layer does to logprobs under perturbed weights.
PROBE_TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}
"""Largest |engine - learner| logprob of a probe token, by the engine's dtype, when the spec names none."""

MEASURED_LOGITS = 10.0
"""Size of the logits that the tolerances were measured with."""


def check_consumed(version: WeightVersion, expected_tensors: int, digest: str, tensors: int) -> None:
    """The bytes that a load consumed are those of `version`.

    Raises:
        WeightCheckFailed: `consumed`.
    """
    if tensors != expected_tensors:
        raise WeightCheckFailed(
            "consumed",
            version,
            f"the engine consumed {tensors} tensors of {expected_tensors}; some were skipped",
        )
    if digest != version.digest:
        raise WeightCheckFailed(
            "consumed",
            version,
            f"the engine consumed tensors with digest {digest}: another version's, or damaged on the way",
        )


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """max |left - right|; infinite if the lengths differ or a number is not finite."""
    if len(left) != len(right):
        return float("inf")
    differences = [abs(a - b) for a, b in zip(left, right, strict=True)]
    # NaN compares false with everything, so `max` alone could hide it.
    return max(differences, default=0.0) if all(d == d for d in differences) else float("inf")


def allowed_difference(probe: Probe, tolerance: float) -> float:
    """How much of a difference rounding may make. It grows with the size of the logits, and with a model of large ones
    the least likely tokens of the probe are as unlikely as that: -50 for logits of size 50."""
    size = max((abs(logprob) for logprob in probe.logprobs), default=0.0)
    return tolerance * max(1.0, size / MEASURED_LOGITS)


def check_probe(version: WeightVersion, probe: Probe, engine_logprobs: Sequence[float], tolerance: float) -> float:
    """The engine's logprobs of the probe equal the learner's. Returns the largest difference.

    Raises:
        WeightCheckFailed: `probe`.
    """
    difference = largest_difference(engine_logprobs, probe.logprobs)
    allowed = allowed_difference(probe, tolerance)
    if not difference <= allowed:
        raise WeightCheckFailed(
            "probe",
            version,
            f"engine and learner differ by {difference:.3g} in the logprob of a probe token (tolerance "
            f"{allowed:.3g}): the engine does not compute with these weights",
        )
    return difference


def check_moved(
    version: WeightVersion,
    probe: Probe,
    before: Sequence[float],
    after: Sequence[float],
    tolerance: float,
) -> float:
    """Loading the perturbed `version` changed the engine's probe logprobs, to what the learner says they are now.

    The change alone is not enough: with one stale layer the others still move the result.

    Args:
        version: the perturbed version.
        probe: the learner's logprobs under it.
        before: the engine's, of the same tokens, under the version before.
        after: the engine's, under the perturbed version.
        tolerance: see `PROBE_TOLERANCE`.

    Returns:
        The largest change.

    Raises:
        WeightCheckFailed: `moved` if nothing changed, `probe` if it changed to something else.
    """
    change = largest_difference(before, after)
    allowed = allowed_difference(probe, tolerance)
    if not change > allowed:
        raise WeightCheckFailed(
            "moved",
            version,
            f"the perturbed weights moved the probe's logprobs by only {change:.3g} (more than "
            f"{allowed:.3g} expected): the engine still serves the old weights",
        )
    check_probe(version, probe, after, tolerance)
    return change
