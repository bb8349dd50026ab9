"""A picture as plain shapes, in pixels from the upper left corner: `svg` and `png` paint the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled box."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    """Colour as `#rrggbb`."""
    tip: str = ""
    """Shown when the mouse is over it."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[Point, ...]
    stroke: str
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    fill: str
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text; `y` is its base line."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = "#333333"
    anchor: Anchor = "start"
    vertical: bool = False
    """Turned to be read from below."""


Shape = Rectangle | Line | Dot | Label


@dataclass
class Drawing:
    """Shapes on a white ground; later ones cover earlier ones."""

    width: int
    height: int
    title: str
    """What a reader who does not see it is told."""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes.extend(shapes)


def polyline(points: Sequence[Point], stroke: str, width: float = 1.0) -> Line:
    """A line through any sequence of points."""
    return Line(tuple(points), stroke, width)
