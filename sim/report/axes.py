"""A frame with two axes: numbers to pixels, ticks at round numbers, titles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhfless.sim.report.drawing import Drawing, Label, Line, Point

LEFT, RIGHT, TOP, BOTTOM = 78, 16, 34, 52
"""Room around the frame, in pixels."""

GRID, INK, PALE = "#e6e6e6", "#333333", "#777777"


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction. Logarithmic axes need a range above 0."""

    title: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the ends: 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Round numbers within the range: about five, or the powers of ten and their halves."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            wide = self.high / self.low > 1e3
            found = [10.0**power * step for power in powers for step in ((1,) if wide else (1, 2, 5))]
        else:
            step = _round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            found = [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if -1e-9 <= self.share(tick) <= 1 + 1e-9]


def spanning(title: str, values: list[float], *, zero: bool = False, log: bool = False) -> Axis:
    """An axis with room for all values; from 0 on if `zero`."""
    low, high = min(values), max(values)
    if log:
        low = max(low, high / 1e6)
        return Axis(title, low / 1.1, max(high, low * 1.01) * 1.1, log=True)
    margin = (high - low) * 0.08 or max(abs(high), 1.0) * 0.08
    return Axis(title, 0.0 if zero else low - margin, high + margin)


@dataclass(frozen=True, slots=True)
class Frame:
    """Two axes on a drawing."""

    drawing: Drawing
    across: Axis
    up: Axis

    def at(self, x: float, y: float) -> Point:
        """The pixel of a pair of values."""
        return self.x(x), self.y(y)

    def x(self, value: float) -> float:
        return LEFT + self.across.share(value) * (self.drawing.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.drawing.height - BOTTOM - self.up.share(value) * (self.drawing.height - TOP - BOTTOM)

    def draw(self) -> None:
        """Grid, ticks and titles. Called before anything is drawn into the frame."""
        left, right = LEFT, self.drawing.width - RIGHT
        top, bottom = TOP, self.drawing.height - BOTTOM
        for tick in self.across.ticks:
            x = self.x(tick)
            self.drawing.add(
                Line(((x, top), (x, bottom)), GRID), Label(x, bottom + 18, short(tick), 11, PALE, "middle")
            )
        for tick in self.up.ticks:
            y = self.y(tick)
            self.drawing.add(Line(((left, y), (right, y)), GRID), Label(left - 8, y + 4, short(tick), 11, PALE, "end"))
        self.drawing.add(
            Line(((left, top), (left, bottom), (right, bottom)), INK),
            Label((left + right) / 2, self.drawing.height - 12, self.across.title, 12, INK, "middle"),
            Label(18, (top + bottom) / 2, self.up.title, 12, INK, "middle", vertical=True),
            Label(left, 20, self.drawing.title, 14, INK),
        )


def short(value: float) -> str:
    """`1,200`, `0.25`, `3k` only where the number is long."""
    if value and abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.10g}" if abs(value) >= 1 or not value else f"{value:.3g}"


def _round_step(step: float) -> float:
    """The next larger of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
