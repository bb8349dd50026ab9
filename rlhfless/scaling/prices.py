"""The price book: what a device slot costs while it is held, working or not.

A YAML file that the user edits; `prices.yaml` beside this module is the default. Every figure carries its
source and date, because rental prices differ by a factor of three between sellers and change by the month.
Time is billed by the second, without a minimum: the billing granularity of a cloud belongs to the machine
under the slots, which outlives any one holding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from rlhfless.records import Holding
from rlhfless.spec import document
from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import InputError, Problem, UserError
from rlhfless.spec.explain import explain, nearest

SECONDS_PER_HOUR = 3600.0


class PriceError(UserError):
    """A device kind without a price. The message names it and the kinds there are."""


class DevicePrice(SpecModel):
    """The price of one kind of device slot."""

    kind: Annotated[str, Field(min_length=1)]
    """Name of the device kind, as holdings carry it."""

    usd_per_hour: Annotated[float, Field(ge=0)]
    """US dollars per hour of one whole slot."""

    source: Annotated[str, Field(min_length=1)]
    """Who sells it at this price, and where the figure was read."""

    as_of: date
    """When it was read."""


class PriceBook(SpecModel):
    """Prices by device kind."""

    devices: Annotated[tuple[DevicePrice, ...], Field(min_length=1)]
    """One entry per device kind."""

    cpu_kind: str = "cpu-core"
    """The device kind of a slot that is a CPU core."""

    @field_validator("devices")
    @classmethod
    def _kinds_differ(cls, devices: Sequence[DevicePrice]) -> Sequence[DevicePrice]:
        kinds = [device.kind for device in devices]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"{twice[0]!r} has two prices; take one of them out")
        return devices

    @model_validator(mode="after")
    def _cpu_has_a_price(self) -> PriceBook:
        if all(device.kind != self.cpu_kind for device in self.devices):
            raise ValueError(f"cpu_kind is {self.cpu_kind!r}, which has no price; add it under `devices`")
        return self

    def price_usd_per_hour(self, kind: str) -> float:
        """The price of one slot of this kind. Raises PriceError for a kind that has none."""
        for device in self.devices:
            if device.kind == kind:
                return device.usd_per_hour
        known = [device.kind for device in self.devices]
        raise PriceError(
            f"no price for device kind {kind!r}; {nearest(kind, known)}Add it under `devices` of the price "
            f"book, which has {', '.join(known)}"
        )

    def cost_usd(self, holdings: Iterable[Holding]) -> float:
        """What the holdings cost: device-seconds x price, in whatever state they were spent.

        Raises PriceError for a device kind without a price.
        """
        return math.fsum(
            holding.device_s * self.price_usd_per_hour(holding.device_kind) / SECONDS_PER_HOUR
            for holding in holdings
            if holding.state.holds_device
        )

    def snapshot(self) -> dict[str, Any]:
        """The book as JSON values, for the trace; `PriceBook.model_validate` reads it back."""
        return self.model_dump(mode="json")


def load_price_book(path: str | os.PathLike[str] | None = None) -> PriceBook:
    """Reads a price book; the bundled one without `path`.

    Raises InputError with all problems: file, line, field, value, and the mend.
    """
    if path is None:
        source, text = "prices.yaml (bundled)", files(__package__).joinpath("prices.yaml").read_text("utf-8")
    else:
        source, text = str(path), _read(Path(path))
    try:
        parsed = document.parse(text)
    except document.DocumentError as error:
        raise InputError(source, [error.problem]) from error
    if not isinstance(parsed.data, dict):
        what = f"a price book is a mapping of keys, got a {type(parsed.data).__name__}"
        raise InputError(source, [Problem("", what, "start it with `devices:`")])
    try:
        return PriceBook.model_validate(parsed.data)
    except ValidationError as error:
        raise InputError(source, explain(error, PriceBook, parsed.origins)) from error


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        mend = "mend `scaling.prices`, or leave it out for the bundled price book"
        raise InputError(str(path), [Problem("", f"cannot be read: {error}", mend)]) from error
