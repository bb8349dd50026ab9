"""Check that an engine loaded the right version. Three checks, as pure functions.

`consumed`: the digest of the tensors that a load consumed equals the version's, and no tensor was skipped. Detects
wrong, old or damaged bytes, and loaders that skip tensors.

`read_back`: elements of every tensor in use by the engine equal the same elements of the learner's live weights bit
for bit; in 8-bit layers, code for code. Detects old weights published as new, a stale or scaled tensor, and a packed
copy that was not refreshed. Works in any dtype, however small the update, and in 8 bits if the update changes codes.
It cannot see packed experts.

`probe`: after each load, the engine's logprobs of a short text equal the learner's, per token and on average.
Detects all other faults: wrong layouts, wrong dtype, another model. It cannot see an update smaller than rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rlhfless.records import Probe, WeightVersion
from rlhfless.spec import DType
from rlhfless.spec.generation import Quantization

Check = Literal["consumed", "read_back", "probe"]


class WeightFileError(Exception):
    """A weight file is missing, truncated or damaged. The message names the file and its digest."""


class WeightCheckFailed(Exception):
    """A load is not the expected version. `check` names the failed check (see `weights.check`)."""

    def __init__(self, check: Check, version: WeightVersion, message: str) -> None:
        super().__init__(f"weight check `{check}` failed for {version.label}: {message}")
        self.check = check
        self.version = version
        self.message = message

    def __reduce__(self) -> tuple[type[WeightCheckFailed], tuple[Check, WeightVersion, str]]:
        # Exceptions are pickled by their `args`; this one crosses process boundaries.
        return (WeightCheckFailed, (self.check, self.version, self.message))


# Engine and learner compute the same function with different kernels, so they add in a different order. The largest
# logprob difference was measured on 4-layer models with logits of size 10, over 400 versions and 127 tokens of each
# version: 1.5e-5 in float32 and 0.25 in bfloat16; float16 follows from the mantissa bits (7 and 10). The tolerances are
# about twice that, and below the effect of a stale layer on logprobs when weights change.
PROBE_TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.06}
"""Largest |engine - learner| logprob of a probe token, by engine dtype, for models of MEASURED_LAYERS."""

FP8_TOLERANCE: dict[DType, float] = {"float32": 1.0, "float16": 2.0, "bfloat16": 2.0}
"""Same for fp8 engines, whose learner also rounds to codes. Arithmetic rounding pushes activations to the next code,
so the difference is larger than without codes. Measured over 25 changed versions of a 4-layer model: the largest was
0.42 in float32 and 0.69 in bfloat16 (10 versions, with the engine's arithmetic but no engine); the largest mean was
0.071 and 0.15. A changed version moved a logprob by at least 2.6, normalized by the size of the logits."""

MEASURED_LAYERS = 4

DEPTH_EXPONENT = 0.35
"""Rounding accumulates over layers: with random bfloat16 models of 4, 28 and 64 layers, the largest mean difference
was 25, 50 and 61 % of the 4-layer allowance. With this growth it stays at a quarter at each depth."""

MEAN_TOLERANCE = 0.125
"""Mean |engine - learner| over the probe's tokens, as a fraction of the tolerance above. The largest mean in the
same measurement was a fourteenth of the tolerance. Wrong weights change every token."""

MEAN_FROM_TOKENS = 32
"""Fewest tokens for the mean check: with fewer, one large difference may dominate it."""

MEASURED_LOGITS = 10.0
"""Size of the logits in the tolerance measurements."""


def default_tolerance(dtype: DType, layers: int | None, quantization: Quantization) -> float:
    """Return the tolerance of a run whose spec sets none. Unknown `layers` counts as a small model."""
    depth: float = max((layers or 0) / MEASURED_LAYERS, 1.0) ** DEPTH_EXPONENT
    of_format = PROBE_TOLERANCE if quantization == "off" else FP8_TOLERANCE
    return of_format[dtype] * depth


def check_consumed(version: WeightVersion, expected_tensors: int, digest: str, tensors: int) -> None:
    """Check that a load consumed exactly the bytes of `version`.

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


def check_read_back(version: WeightVersion, compared: Mapping[str, tuple[int, int]]) -> None:
    """Check that the elements that an engine read back equal the learner's.

    Args:
        version: the version that the engine loaded.
        compared: by tensor: the number of elements compared, and the number that differ.

    Raises:
        WeightCheckFailed: `read_back`.
    """
    wrong = {name: (count, total) for name, (total, count) in compared.items() if count}
    if wrong:
        name, (count, total) = max(wrong.items(), key=lambda item: item[1][0] / item[1][1])
        more = f", and elements of {len(wrong) - 1} other tensors" if len(wrong) > 1 else ""
        raise WeightCheckFailed(
            "read_back",
            version,
            f"{count} of {total} sampled elements of {name!r}{more} are not the learner's in the layers that serve: "
            "the engine computes with other weights. If this engine is meant to change weights as it loads them, "
            "set weights.read_back: false",
        )


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Return max |left - right|, or infinity if the lengths differ or a number is not finite."""
    if len(left) != len(right):
        return float("inf")
    differences = [abs(a - b) for a, b in zip(left, right, strict=True)]
    # NaN compares false with everything, so `max` alone could hide it.
    return max(differences, default=0.0) if all(d == d for d in differences) else float("inf")


def mean_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Return mean |left - right| of two sequences of equal length; 0 if empty."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(len(left), 1)


def allowed_difference(probe: Probe, tolerance: float) -> float:
    """Return the largest difference that rounding may cause.

    It grows with the size of the logits, estimated from the logprob of the probe's least likely token: about -50 for
    logits of size 50.
    """
    size = max((abs(logprob) for logprob in probe.logprobs), default=0.0)
    return tolerance * max(1.0, size / MEASURED_LOGITS)


def check_probe(version: WeightVersion, probe: Probe, engine_logprobs: Sequence[float], tolerance: float) -> float:
    """Check that the engine's logprobs of the probe equal the learner's, and return the largest difference.

    Raises:
        WeightCheckFailed: `probe`.
    """
    difference = largest_difference(engine_logprobs, probe.logprobs)
    allowed, tokens = allowed_difference(probe, tolerance), len(probe.logprobs)
    mean_allowed = allowed * MEAN_TOLERANCE
    if not difference <= allowed:
        fault = f"{difference:.3g} in the logprob of a probe token (tolerance {allowed:.3g})"
    elif tokens >= MEAN_FROM_TOKENS and not (mean := mean_difference(engine_logprobs, probe.logprobs)) <= mean_allowed:
        fault = f"{mean:.3g} on average over {tokens} probe tokens (tolerance {mean_allowed:.3g})"
    else:
        return difference
    pairs = list(zip(probe.token_ids[1:], probe.logprobs, engine_logprobs, strict=False))
    pairs.sort(key=lambda pair: -abs(pair[1] - pair[2]))
    worst = ", ".join(f"{learner:.3g} and {engine:.3g} of token {token}" for token, learner, engine in pairs[:3])
    raise WeightCheckFailed(
        "probe",
        version,
        f"engine and learner differ by {fault}: the engine does not compute with these weights; learner's and engine's "
        f"logprobs: {worst}",
    )
