"""A drawing as SVG text, to stand in an HTML page or alone."""

from __future__ import annotations

from html import escape

from rlhfless.sim.report.drawing import Dot, Drawing, Label, Line, Rectangle, Shape

FONT = "system-ui, sans-serif"


def svg(drawing: Drawing) -> str:
    """One `<svg>` element that scales to its place. It refers to nothing outside itself."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" role="img" '
        f'font-family="{FONT}"><title>{escape(drawing.title)}</title>'
    )
    ground = f'<rect width="{drawing.width}" height="{drawing.height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *map(_element, drawing.shapes), "</svg>"])


def _element(shape: Shape) -> str:
    if isinstance(shape, Rectangle):
        size = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
        return _with_tip(f'<rect {size} fill="{shape.fill}"', "rect", shape.tip)
    if isinstance(shape, Dot):
        size = f'cx="{shape.x:.2f}" cy="{shape.y:.2f}" r="{shape.radius:.2f}"'
        return _with_tip(f'<circle {size} fill="{shape.fill}"', "circle", shape.tip)
    if isinstance(shape, Line):
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
        return f'<polyline points="{points}" fill="none" stroke="{shape.stroke}" stroke-width="{shape.width:g}"/>'
    return _text(shape)


def _text(label: Label) -> str:
    turn = f' transform="rotate(-90 {label.x:.2f} {label.y:.2f})"' if label.vertical else ""
    place = f'x="{label.x:.2f}" y="{label.y:.2f}" text-anchor="{label.anchor}"'
    return f'<text {place} font-size="{label.size:g}" fill="{label.fill}"{turn}>{escape(label.text)}</text>'


def _with_tip(opened: str, name: str, tip: str) -> str:
    return f"{opened}><title>{escape(tip)}</title></{name}>" if tip else f"{opened}/>"
