"""The pictures of a report, as drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, Work
from rlhfless.scaling.intervals import clip, union
from rlhfless.sim.experiment.statistics import Interval
from rlhfless.sim.report.axes import INK, LEFT, PALE, TOP, Axis, Frame, spanning
from rlhfless.sim.report.drawing import Dot, Drawing, Label, Line, Rectangle

WIDTH, HEIGHT = 760, 440

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#17becf", "#bcbd22",
    "#6a3d9a", "#b15928", "#000000",
)  # fmt: skip
"""The palette of Okabe and Ito, which people with any kind of colour blindness can tell apart, and a few more."""

STATE_COLOURS: Mapping[ReplicaState, str] = {
    ReplicaState.STARTING: "#f0a030",
    ReplicaState.STALE: "#ffe0a0",
    ReplicaState.SERVING: "#dcdcdc",
    ReplicaState.DRAINING: "#c8b8d8",
    ReplicaState.SLEEPING: "#f4f4f4",
    ReplicaState.SUSPECT: "#e04040",
}

WORK_COLOURS: Mapping[Work, str] = {
    Work.GENERATE: "#0072b2",
    Work.LOAD_WEIGHTS: "#e6c800",
    Work.SCORE: "#56b4e9",
    Work.LOGPROBS: "#009e73",
    Work.EVALUATE: "#cc79a7",
    Work.LEARN: "#d55e00",
    Work.PUBLISH: "#8c564b",
}


def colour(index: int) -> str:
    """The colour of a policy, by its place in the scenario."""
    return COLOURS[index % len(COLOURS)]


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One policy."""

    label: str
    usd: Interval
    seconds: Interval


def pareto(points: Sequence[ParetoPoint], title: str) -> Drawing:
    """Cost against time of a step, with confidence intervals. Lower left is better; the line joins the best."""
    drawing = Drawing(WIDTH, HEIGHT + 16 * ((len(points) + 2) // 3), title)
    plot = Drawing(WIDTH, HEIGHT, title)
    ends = [(point.usd.low, point.usd.high) for point in points], [(p.seconds.low, p.seconds.high) for p in points]
    across, up = ([value for pair in pairs for value in pair] for pairs in ends)
    frame = Frame(plot, spanning("US dollars per step", across), spanning("seconds per step", up))
    frame.draw()
    best = _front([(point.usd.mean, point.seconds.mean) for point in points])
    plot.add(Line(tuple(frame.at(x, y) for x, y in best), "#bbbbbb", 1.5))
    for index, point in enumerate(points):
        _cross(frame, point, colour(index))
    drawing.add(*plot.shapes)
    for index, point in enumerate(points):
        x, y = LEFT + (index % 3) * 225, HEIGHT + 8 + 16 * (index // 3)
        drawing.add(Dot(x, y - 4, 5, colour(index)), Label(x + 10, y, point.label, 12, INK))
    return drawing


def _cross(frame: Frame, point: ParetoPoint, ink: str) -> None:
    tip = f"{point.label}: {point.seconds.mean:.4g} s and ${point.usd.mean:.4g} per step"
    x, y = frame.at(point.usd.mean, point.seconds.mean)
    frame.drawing.add(
        Line(((frame.x(point.usd.low), y), (frame.x(point.usd.high), y)), ink, 1.5),
        Line(((x, frame.y(point.seconds.low)), (x, frame.y(point.seconds.high))), ink, 1.5),
        Dot(x, y, 5, ink, tip),
    )


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both."""
    best: list[tuple[float, float]] = []
    for usd, seconds in sorted(points):
        if not best or seconds < best[-1][1]:
            best.append((usd, seconds))
    return best


ROW = 18
"""Height of a Gantt row, in pixels."""

GANTT_LEFT = 110

CPU_ONLY = frozenset({FunctionName.SCORING})
"""Has no accelerator, and no row."""


def gantt(
    holdings: Sequence[Holding], invocations: Sequence[Invocation], start_s: float, end_s: float, title: str
) -> Drawing:
    """Who held each device between two times, in which state, and when it worked."""
    devices = sorted({holding.device for holding in holdings if holding.function not in CPU_ONLY}, key=_natural)
    drawing = Drawing(WIDTH, TOP + ROW * len(devices) + 78, title)
    axis = Axis("seconds since the step began", 0.0, end_s - start_s)
    scale = (WIDTH - GANTT_LEFT - 16) / (end_s - start_s)
    work: dict[str, dict[Work, list[tuple[float, float]]]] = {}
    for call in invocations:
        work.setdefault(call.incarnation, {}).setdefault(call.work, []).append((call.start_s, call.end_s))
    drawing.add(Label(8, 20, title, 14, INK))
    for row, device in enumerate(devices):
        top = TOP + ROW * row
        drawing.add(Label(GANTT_LEFT - 8, top + 13, device, 11, PALE, "end"))
        for holding in sorted((each for each in holdings if each.device == device), key=_awake):
            low, high = max(holding.start_s, start_s), min(holding.end_s, end_s)
            if low >= high:
                continue
            x = GANTT_LEFT + (low - start_s) * scale
            tip = f"{holding.replica} {holding.state}: {low - start_s:.1f} to {high - start_s:.1f} s"
            drawing.add(Rectangle(x, top + 2, (high - low) * scale, ROW - 4, STATE_COLOURS[holding.state], tip))
            for kind, spans in work.get(holding.incarnation, {}).items():
                for begin, end in clip(union(spans), low, high):
                    tip = f"{holding.replica} {kind}: {begin - start_s:.1f} to {end - start_s:.1f} s"
                    x, width = GANTT_LEFT + (begin - start_s) * scale, (end - begin) * scale
                    drawing.add(Rectangle(x, top + 4, width, ROW - 8, WORK_COLOURS[kind], tip))
    bottom = TOP + ROW * len(devices)
    for tick in axis.ticks:
        x = GANTT_LEFT + tick * scale
        drawing.add(Line(((x, bottom), (x, bottom + 5)), INK), Label(x, bottom + 18, f"{tick:g}", 11, PALE, "middle"))
    drawing.add(Label((GANTT_LEFT + WIDTH) / 2, bottom + 36, axis.title, 12, INK, "middle"))
    _gantt_legend(drawing, bottom + 60)
    return drawing


def _awake(holding: Holding) -> bool:
    """Whoever is awake is drawn over those that sleep on the same device."""
    return holding.state is not ReplicaState.SLEEPING


def _gantt_legend(drawing: Drawing, y: float) -> None:
    entries = [("starting", STATE_COLOURS[ReplicaState.STARTING]), ("held, idle", STATE_COLOURS[ReplicaState.SERVING])]
    entries += [(str(work).replace("_", " "), ink) for work, ink in WORK_COLOURS.items()]
    x = 8.0
    for text, ink in entries:
        drawing.add(Rectangle(x, y - 9, 11, 11, ink), Label(x + 15, y, text, 11, INK))
        x += 26 + 6.4 * len(text)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts `h100-10` behind `h100-9`."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.replace("-", " ").split()]


def length_distribution(by_name: Mapping[str, npt.NDArray[np.int64]], title: str) -> Drawing:
    """Share of the responses that are longer than so many tokens."""
    drawing = Drawing(WIDTH, HEIGHT, title)
    longest = max(int(lengths.max()) for lengths in by_name.values())
    shortest = max(min(int(lengths.min()) for lengths in by_name.values()), 1)
    across = Axis("response tokens", float(shortest), float(max(longest, shortest + 1)), log=True)
    frame = Frame(drawing, across, Axis("share of responses that are longer", 0.0, 1.0))
    frame.draw()
    for index, (name, lengths) in enumerate(by_name.items()):
        levels = np.linspace(0, 1, 201)
        tokens = np.quantile(lengths, levels)
        points = tuple(frame.at(max(float(x), across.low), float(1 - y)) for x, y in zip(tokens, levels, strict=True))
        drawing.add(Line(points, colour(index), 2))
        x, y = WIDTH - 230, TOP + 18 + 16 * index
        drawing.add(Dot(x, y - 4, 5, colour(index)), Label(x + 10, y, name, 12, INK))
    return drawing


def scatter(
    expected: npt.NDArray[np.float64], real: npt.NDArray[np.float64], unit: str, title: str, log: bool = True
) -> Drawing:
    """What was forecast against what came; on the line both are equal."""
    drawing = Drawing(WIDTH, HEIGHT, title)
    both = [float(value) for value in np.concatenate([expected, real])]
    frame = Frame(drawing, spanning(f"forecast {unit}", both, log=log), spanning(f"real {unit}", both, log=log))
    frame.draw()
    ends = max(frame.across.low, frame.up.low), min(frame.across.high, frame.up.high)
    drawing.add(Line((frame.at(ends[0], ends[0]), frame.at(ends[1], ends[1])), "#999999", 1.5))
    for x, y in zip(expected.tolist(), real.tolist(), strict=True):
        drawing.add(Dot(*frame.at(x, y), 1.6, colour(0)))
    return drawing
