"""A drawing as a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from rlhfless.sim.report.drawing import Dot, Drawing, Label, Line, Rectangle

SCALE = 2
"""Pixels of the file per pixel of the drawing, so that it stays sharp on dense screens."""

_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def write_png(drawing: Drawing, path: Path) -> None:
    """Paints it. Raises OSError if the file cannot be written."""
    image = Image.new("RGB", (drawing.width * SCALE, drawing.height * SCALE), "#ffffff")
    brush = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Rectangle):
            right, lower = shape.x + shape.width, shape.y + shape.height
            box = [shape.x * SCALE, shape.y * SCALE, max(right, shape.x) * SCALE, max(lower, shape.y) * SCALE]
            brush.rectangle(box, fill=shape.fill)
        elif isinstance(shape, Dot):
            brush.circle((shape.x * SCALE, shape.y * SCALE), shape.radius * SCALE, fill=shape.fill)
        elif isinstance(shape, Line):
            points = [(x * SCALE, y * SCALE) for x, y in shape.points]
            brush.line(points, fill=shape.stroke, width=max(round(shape.width * SCALE), 1), joint="curve")
        else:
            _write(image, brush, shape)
    image.save(path, optimize=True)


def _write(image: Image.Image, brush: Any, label: Label) -> None:
    font = ImageFont.load_default(label.size * SCALE)
    if not label.vertical:
        brush.text((label.x * SCALE, label.y * SCALE), label.text, label.fill, font, _ANCHORS[label.anchor])
        return
    left, top, right, bottom = (round(value) for value in brush.textbbox((0, 0), label.text, font))
    paper = Image.new("RGB", (right - left + 2, bottom - top + 2), "#ffffff")
    ImageDraw.Draw(paper).text((-left, -top), label.text, label.fill, font)
    turned = paper.rotate(90, expand=True)
    before = {"start": 1.0, "middle": 0.5, "end": 0.0}[label.anchor] * turned.height
    image.paste(turned, (round(label.x * SCALE - turned.width), round(label.y * SCALE - before)))
