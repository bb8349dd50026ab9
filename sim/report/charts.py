"""The pictures of a report, drawn by matplotlib. The tool tip of a shape is stored in its `gid`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, StrMethodFormatter

from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, Work
from rlhfless.scaling.intervals import clip, union
from rlhfless.sim.report.words import work_text
from rlhfless.sim.statistics import Interval

WIDTH, HEIGHT = 7.6, 4.4
"""Inches of a picture."""

DPI = 200

DOT = 6.0
"""Points of a dot."""

SAME = 0.01
"""Policies nearer than this share in cost and in time have dots on top of each other."""

TIP = re.compile(r"""<g id=(["'])tip: (.*?)\1>""")
"""Where matplotlib has written the `gid` of a shape with a `tip`."""

INK, PALE, GRID = "#333333", "#777777", "#e6e6e6"

STYLE: dict[Any, Any] = {
    "font.size": 8.5, "text.color": INK, "text.parse_math": False,
    "axes.titlesize": 10, "axes.titlelocation": "left", "axes.labelcolor": INK, "axes.edgecolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": GRID, "xtick.color": PALE, "ytick.color": PALE, "xtick.major.size": 0, "ytick.major.size": 0,
    "legend.frameon": False, "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text
}  # fmt: skip

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#17becf", "#bcbd22",
    "#6a3d9a", "#b15928", "#000000",
)  # fmt: skip
"""The palette of Okabe and Ito, suitable for all kinds of colour blindness, and a few more colours."""

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
    Work.PRECOMPUTE: "#004c80",
    Work.PROVE_LOADING: "#b39b00",
    Work.LOAD_WEIGHTS: "#e6c800",
    Work.SCORE: "#56b4e9",
    Work.LOGPROBS: "#009e73",
    Work.EVALUATE: "#cc79a7",
    Work.LEARN: "#d55e00",
    Work.PUBLISH: "#8c564b",
    Work.SLEEP: "#9a9a9a",
    Work.WAKE: "#6e6e6e",
}

CRITIC_COLOURS: Mapping[Work, str] = {Work.LOGPROBS: "#8fbc3f", Work.LEARN: "#556b2f"}
"""Of a critic's work, which is of the same kinds as that of the reference and the learner."""

CPU_ONLY = frozenset({FunctionName.SCORING})
"""Functions without an accelerator: they have no row in a Gantt chart."""


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One policy."""

    label: str
    usd: Interval
    seconds: Interval


LEAST_RANGE = 0.2
"""An axis shows at least this share of the figures below and above them."""


@rc_context(STYLE)
def pareto(points: Sequence[ParetoPoint], title: str) -> Figure:
    """Cost against time of a step, with confidence intervals. Lower left is better; the line joins the best."""
    legend = 0.2 + 0.16 * ((len(points) + 2) // 3)
    figure, axes = _frame(title, "US dollars per step", "seconds per step", HEIGHT + legend, bottom=0.52 + legend)
    best = _front([(point.usd.mean, point.seconds.mean) for point in points])
    axes.plot([usd for usd, _ in best], [seconds for _, seconds in best], color="#bbbbbb")
    dots = []
    for index, point in enumerate(points):
        x, y = point.usd, point.seconds
        # An interval may reach below 0, where neither a cost nor a time can be.
        wide, high = ([[each.mean - max(each.low, 0.0)], [each.high - each.mean]] for each in (x, y))
        size = DOT * (1 + 0.6 * sum(_alike(point, other) for other in points[index + 1 :]))
        dot, *_ = axes.errorbar(x.mean, y.mean, high, wide, fmt="o", color=_colour(index), markersize=size)
        dots.append(dot)
        dot.set_gid(tip(f"{point.label}: {y.mean:.4g} s and ${x.mean:.4g} per step"))
    costs, times = [point.usd.mean for point in points], [point.seconds.mean for point in points]
    axes.set_xlim(*_widened(axes.get_xlim(), costs))
    axes.set_ylim(*_widened(axes.get_ylim(), times))
    labels = [point.label for point in points]
    figure.legend(dots, labels, loc="lower left", ncols=3, bbox_to_anchor=(0.08, 0.0), handlelength=0.6)
    return figure


def _widened(limits: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis such that differences of a few per cent do not fill it."""
    return min(limits[0], (1 - LEAST_RANGE) * max(values)), max(limits[1], (1 + LEAST_RANGE) * min(values))


def _alike(point: ParetoPoint, other: ParetoPoint) -> bool:
    """Whether the dots of two policies would hide each other: the earlier one is drawn larger, as a ring around it."""
    pairs = (point.usd.mean, other.usd.mean), (point.seconds.mean, other.seconds.mean)
    return all(abs(ours - its) <= SAME * max(ours, its) for ours, its in pairs)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both."""
    best: list[tuple[float, float]] = []
    for usd, seconds in sorted(points):
        if not best or seconds < best[-1][1]:
            best.append((usd, seconds))
    return best


@rc_context(STYLE)
def gantt(
    holdings: Sequence[Holding],
    invocations: Sequence[Invocation],
    start_s: float,
    end_s: float,
    title: str,
    deadline_s: float | None = None,
) -> Figure:
    """Which replica held each device between two times, in which state, and when it worked; and the step's deadline, in
    seconds since its begin."""
    devices = sorted({holding.device for holding in holdings if holding.function not in CPU_ONLY}, key=_natural)
    height = 1.28 + 0.18 * len(devices)
    figure, axes = _frame(title, "seconds since the step began", "", height, left=1.1, bottom=0.94)
    axes.grid(False)
    axes.set(xlim=(0.0, max(end_s - start_s, deadline_s or 0.0)), ylim=(len(devices) - 0.5, -0.5))
    if deadline_s is not None:
        axes.axvline(deadline_s, color=INK, linestyle="--", linewidth=1.0).set_gid(tip(f"deadline: {deadline_s:.1f} s"))
    axes.set_yticks(range(len(devices)), devices)
    row = {device: number for number, device in enumerate(devices)}
    calls: dict[str, list[Invocation]] = {}
    for call in invocations:
        calls.setdefault(call.incarnation, []).append(call)
    # A replica that is awake is drawn over replicas that sleep on the same device.
    for holding in sorted(holdings, key=lambda holding: holding.state is not ReplicaState.SLEEPING):
        low, high = max(holding.start_s, start_s), min(holding.end_s, end_s)
        if low < high and holding.device in row:
            states = [(str(holding.state), STATE_COLOURS[holding.state], low, high, 0.4)]
            for what, ink, begin, end, half in (*states, *_worked(calls.get(holding.incarnation, []), low, high)):
                corner = begin - start_s, row[holding.device] - half
                bar = Rectangle(corner, end - begin, 2 * half, color=ink, linewidth=0, snap=False)
                bar.set_gid(tip(f"{holding.replica} {what}: {begin - start_s:.1f} to {end - start_s:.1f} s"))
                axes.add_patch(bar)
    critic = any(holding.function == FunctionName.CRITIC for holding in holdings)
    keys = _keys(deadline=deadline_s is not None, critic=critic)
    figure.legend(handles=keys, loc="lower left", ncols=6, fontsize=7.5, handlelength=1.0, columnspacing=1.2)
    return figure


def _keys(*, deadline: bool, critic: bool) -> list[Patch | Line2D]:
    """What the colours of `gantt` mean."""
    named = {"starting": STATE_COLOURS[ReplicaState.STARTING], "held, idle": STATE_COLOURS[ReplicaState.SERVING]}
    named |= {"without weights": STATE_COLOURS[ReplicaState.STALE], "asleep": STATE_COLOURS[ReplicaState.SLEEPING]}
    named |= {work_text(FunctionName.LEARNER, work): ink for work, ink in WORK_COLOURS.items()}
    if critic:
        named |= {work_text(FunctionName.CRITIC, work): ink for work, ink in CRITIC_COLOURS.items()}
    keys: list[Patch | Line2D] = [
        Patch(facecolor=ink, label=name, edgecolor=GRID, linewidth=0.5) for name, ink in named.items()
    ]
    if deadline:
        keys.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.0, label="deadline"))
    return keys


def _worked(calls: Sequence[Invocation], low: float, high: float) -> Iterator[tuple[str, str, float, float, float]]:
    """Work of one replica within a holding: name, colour, start, end, and half of the height of its bar."""
    for work in dict.fromkeys(call.work for call in calls):
        of_work = [call for call in calls if call.work is work]
        function, ink = of_work[0].function, WORK_COLOURS[work]
        if function == FunctionName.CRITIC:
            ink = CRITIC_COLOURS.get(work, ink)
        for begin, end in clip(union((call.start_s, call.end_s) for call in of_work), low, high):
            yield work_text(function, work), ink, begin, end, 0.28


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts `h100-10` behind `h100-9`."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.replace("-", " ").split()]


@rc_context(STYLE)
def length_distribution(by_name: Mapping[str, npt.NDArray[np.int64]], title: str) -> Figure:
    """Share of the responses that are longer than so many tokens."""
    figure, axes = _frame(title, "response tokens", "share of responses that are longer")
    shortest = max(min(int(lengths.min()) for lengths in by_name.values()), 1)
    longest = max(*(int(lengths.max()) for lengths in by_name.values()), shortest + 1)
    levels = np.linspace(0, 1, 201)
    for index, (name, lengths) in enumerate(by_name.items()):
        axes.plot(np.maximum(np.quantile(lengths, levels), shortest), 1 - levels, color=_colour(index), label=name)
    _logarithmic(axes, "x", shortest, longest)
    axes.set_ylim(0.0, 1.0)
    axes.legend(loc="upper right")
    return figure


@rc_context(STYLE)
def scatter(expected: npt.NDArray[np.float64], real: npt.NDArray[np.float64], unit: str, title: str) -> Figure:
    """Forecast against real values; on the line both are equal."""
    figure, axes = _frame(title, f"forecast {unit}", f"real {unit}")
    both = np.concatenate([expected, real])
    ends = max(float(both.min()), float(both.max()) / 1e6) / 1.1, float(both.max()) * 1.1
    for direction in ("x", "y"):
        _logarithmic(axes, direction, *ends)
    axes.plot(ends, ends, color="#999999")
    axes.scatter(expected, real, s=5, linewidths=0, color=_colour(0))
    return figure


def _frame(
    title: str, across: str, up: str, height: float = HEIGHT, left: float = 0.78, bottom: float = 0.52
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; sizes are inches."""
    figure = Figure((WIDTH, height))
    axes = figure.add_axes((left / WIDTH, bottom / height, 1 - (left + 0.16) / WIDTH, 1 - (bottom + 0.34) / height))
    axes.set(title=title, xlabel=across, ylabel=up)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    return figure, axes


def _logarithmic(axes: Axes, direction: str, low: float, high: float) -> None:
    """Ticks at the powers of ten, and at twice and five times the powers if there is space."""
    axes.set(**{f"{direction}scale": "log", f"{direction}lim": (low, high)})
    axis = axes.xaxis if direction == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1e3 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_locator(LogLocator(subs=()))


def _colour(index: int) -> str:
    """The colour of a policy, by its number in the scenario."""
    return COLOURS[index % len(COLOURS)]


def tip(text: str) -> str:
    """The `gid` of a shape that shows a text when the mouse is over it."""
    return f"tip: {text}"


@rc_context(STYLE)
def svg(figure: Figure) -> str:
    """One `<svg>` element that scales to its place. It refers to nothing outside itself."""
    text, title = StringIO(), figure.axes[0].get_title("left")
    with rc_context({"svg.hashsalt": title}):  # the same names every time, and other names in every picture of a page
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = text.getvalue()
    head, body = drawn[drawn.index("<svg ") :].split(">", 1)
    return f'{head} role="img"><title>{escape(title)}</title>' + re.sub(TIP, r"<g><title>\2</title>", body)


@rc_context(STYLE)
def write_png(figure: Figure, path: Path) -> None:
    """Raises OSError if the file cannot be written."""
    figure.savefig(path, format="png", dpi=DPI)
