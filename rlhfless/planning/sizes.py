"""The sizes of an elastic run: numbers of devices that keep a node's devices together and on which the run fits."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.planning.inputs import DeviceCount
from rlhfless.planning.memory_plan import Question
from rlhfless.planning.resolve import on_cores, plan_problems, resolve
from rlhfless.scaling.placement import NODE_DEVICES, PlacementError
from rlhfless.scaling.sizes import sizes_up_to
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, Problem


@dataclass(frozen=True, slots=True)
class FittingSize:
    """A number of devices on which a run fits, and the run there."""

    devices: int
    asked: Question | None
    """None where `resolve` has none: a model of the hub on CPU cores, whose memory is no limit."""


def fitting_sizes(
    spec: RunSpec, kind: str, present: int, sequence_tokens: int | None = None, *, required: bool = False
) -> list[FittingSize]:
    """Return the sizes within `placement.devices` on which the run fits, fewest devices first.

    `present` is the number of devices of the kind; more are tried only if the spec names more. `sequence_tokens` and
    `required` are those of `resolve`. Raises InputError if a named `min` or no size fits.
    """
    wanted = spec.placement.size_range
    if wanted is None:
        raise ValueError("the run has one size; ask only for elastic runs")
    least = 1 if wanted.min == "auto" else wanted.min
    most = max(present, least) if wanted.max == "auto" else wanted.max
    named = {size for size in (wanted.min, wanted.max) if size != "auto"}
    sizes = [size for size in sorted({*sizes_up_to(most, NODE_DEVICES), *named}) if least <= size <= most]
    fitting, refused = [], {}
    for size in sizes:
        try:
            fitting.append(_fitting(spec, DeviceCount(kind, size), sequence_tokens, required=required))
        except PlacementError as error:
            refused[size] = str(error)
    if not fitting:
        what = f"the run fits on no size from {least} to {most} x {kind}: on {most}, {refused[most]}"
        raise InputError("the run's sizes", [Problem("placement.devices", what, "allow more devices")])
    if least in refused and wanted.min != "auto":
        what = f"{least}: the run does not fit on {least} x {kind}: {refused[least]}"
        hint = f"set it to {fitting[0].devices}, or to auto"
        raise InputError("the run's sizes", [Problem("placement.devices.min", what, hint)])
    return fitting


def _fitting(spec: RunSpec, devices: DeviceCount, sequence_tokens: int | None, *, required: bool) -> FittingSize:
    """Return the run on these devices. Raises PlacementError with the reason if it does not fit."""
    asked = resolve(spec, devices, sequence_tokens, required=required).asked
    if asked is not None and not on_cores(spec, devices.kind) and (problems := plan_problems(asked, asked.plan())):
        raise PlacementError("; ".join(problems))
    return FittingSize(devices.count, asked)
