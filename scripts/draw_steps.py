"""Draws some steps of a recorded run as a timeline: which function worked when.

python scripts/draw_steps.py RUN_FOLDER FIRST_STEP LAST_STEP OUT.svg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfless.records import Invocation, Work
from rlhfless.records.traces import read_trace

WIDTH, ROW, LEFT, TOP = 900, 34, 120, 40
COLOURS = {
    Work.GENERATE: "#4c78a8",
    Work.LOAD_WEIGHTS: "#b279a2",
    Work.SCORE: "#f58518",
    Work.LOGPROBS: "#72b7b2",
    Work.EVALUATE: "#8cd17d",
    Work.LEARN: "#54a24b",
    Work.PUBLISH: "#e45756",
}
NARROWEST = 2.0
"""Pixels of the shortest bar: a scoring call takes a millisecond, and must be seen."""


@dataclass(frozen=True)
class Scale:
    """Seconds to pixels."""

    start_s: float
    end_s: float

    def x(self, at_s: float) -> float:
        return LEFT + (at_s - self.start_s) / (self.end_s - self.start_s) * (WIDTH - LEFT - 20)


def main() -> None:
    folder, first, last, out = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    trace = read_trace(folder / "trace")
    steps = [step for step in trace.steps if first <= step.step <= last]
    scale = Scale(steps[0].start_s, steps[-1].end_s)
    calls = [c for c in trace.invocations if c.end_s > scale.start_s and c.start_s < scale.end_s and c.work in COLOURS]
    parts = [*_rows(calls, scale), *_step_lines([step.start_s for step in steps], first, scale, calls)]
    rows = len({call.replica for call in calls})
    out.write_text(_document(parts, TOP + rows * ROW + 60))


def _rows(calls: Sequence[Invocation], scale: Scale) -> list[str]:
    names = sorted({call.replica for call in calls}, key=_order)
    parts = []
    for row, name in enumerate(names):
        y = TOP + row * ROW
        label = "-".join(name.split("-")[-2:])
        parts.append(f'<text x="{LEFT - 10}" y="{y + 20}" text-anchor="end">{label}</text>')
        for call in calls:
            if call.replica == name:
                x = scale.x(call.start_s)
                width = max(scale.x(call.end_s) - x, NARROWEST)
                shape = f'x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{ROW - 10}" rx="2"'
                parts.append(f'<rect {shape} fill="{COLOURS[call.work]}"/>')
    return parts


def _order(name: str) -> tuple[int, str]:
    functions = ("generation", "scoring", "reference", "learner")
    return next(i for i, function in enumerate(functions) if function in name), name


def _step_lines(starts: Sequence[float], first: int, scale: Scale, calls: Sequence[Invocation]) -> list[str]:
    bottom = TOP + len({call.replica for call in calls}) * ROW
    parts = []
    for number, start_s in enumerate(starts, first):
        x = scale.x(start_s)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#999" stroke-dasharray="3"/>'
        )
        parts.append(f'<text x="{x + 4:.1f}" y="{TOP - 12}">step {number}</text>')
    end = f"{scale.end_s - scale.start_s:.1f} s"
    parts.append(f'<text x="{WIDTH - 20}" y="{TOP - 12}" text-anchor="end">{end}</text>')
    x = LEFT
    for work in [work for work in COLOURS if any(call.work is work for call in calls)]:
        parts.append(f'<rect x="{x}" y="{bottom + 18}" width="12" height="12" rx="2" fill="{COLOURS[work]}"/>')
        parts.append(f'<text x="{x + 18}" y="{bottom + 29}">{work.replace("_", " ")}</text>')
        x += 40 + 8 * len(work)
    return parts


def _document(parts: Sequence[str], height: int) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="13">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    main()
