"""Progress on the terminal: a self-redrawing table, or plain lines if there is no terminal.

`live` and `lines` show the same figures. Steps count from 1, so the last step equals the number of steps; an emission
without `step_s` (an evaluation) is a note, not a step. The run never waits for the console: a thread draws the latest
figures.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TextIO, cast

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhfless.records import in_order
from rlhfless.records.ledger import PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.telemetry.sinks import NO_SAMPLES
from rlhfless.telemetry.terminal import LastingStream, Terminal, clock, count, decimal, money
from rlhfless.util.text import legible, tolerant

# Steps shown in the table, and averaged to estimate the remaining time.
_RECENT_STEPS = 8
# Four frames per second: seconds tick without flooding a remote terminal.
_FRAMES_PER_S = 4
_BAR_COLUMNS = 32
_WIDE = 90
"""Terminal width in columns from which the table includes prompt tokens."""
_EVAL = "eval/"
_UNIQUE = f"{PROMPT_TOKENS_UNIQUE}/"


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    what: str
    began: float
    spinner: Spinner


class Console:
    """Shows the progress of a run on the terminal. Also a MetricSink.

    `live` falls back to `lines` unless the stream is a terminal that can redraw.
    """

    def __init__(
        self,
        mode: Literal["live", "lines", "off"],
        title: str,
        steps: int,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = LastingStream(tolerant(stream or sys.stdout))
        self._terminal = Terminal(file=cast(TextIO, self._stream), quiet=mode == "off")
        self._title = legible(title)
        self._steps = steps
        self._now = now
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=_RECENT_STEPS)
        self._began = now()
        self._resumed_after = 0
        self._evaluation: dict[str, tuple[float, float]] = {}  # first and latest
        self._waiting: list[_Wait] = []
        self._live: Live | None = None
        if mode == "live" and self._terminal.is_terminal and not self._terminal.is_dumb_terminal:
            self._live = Live(get_renderable=self._frame, console=self._terminal, refresh_per_second=_FRAMES_PER_S)
            self._live.start()
        else:
            self._print(self._title)

    @property
    def done(self) -> int:
        """The last emitted step, or the step that the run resumed after."""
        return self._recent[-1][0] if self._recent else self._resumed_after

    @property
    def closed_by_reader(self) -> bool:
        """Return whether the reader is gone, in which case output is dropped."""
        return self._stream.closed_by_reader

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show the current wait and its duration, such as a start."""
        began, what = self._now(), legible(what)
        if self._live is None:
            self._print(f"{what} ...")
        with self._stage(what, began):
            yield
        if self._live is None:
            self._print(f"{what}: done in {clock(self._now() - began)}")

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show a stage of a step while it lasts. Like `waiting`, but without its own line."""
        with self._stage(what, self._now()):
            yield

    def resumed(self, step: int, attempt: int, earlier_s: float) -> None:
        """Include the steps and time of earlier attempts."""
        self._resumed_after = step
        self._began -= earlier_s
        if self._live is None:
            earlier = f"earlier ones took {clock(earlier_s)}"
            self._print(f"step {step:>{len(str(self._steps))}}/{self._steps}  resumed, attempt {attempt}; {earlier}")

    def set_activity(self, what: str) -> None:
        """Show the activity of a run on another machine until the next call."""
        what = legible(what)
        with self._lock:
            self._waiting = [_Wait(what, self._now(), Spinner("dots"))] if what else []

    def emit(
        self,
        step: int,
        values: Mapping[str, float],
        samples: Mapping[str, Sequence[float]] = NO_SAMPLES,  # noqa: ARG002
    ) -> None:
        """Show a step or an evaluation. Histograms are not shown; their mean and maximum are values."""
        with self._lock:
            for name, value in values.items():
                if name.startswith(_EVAL):
                    self._evaluation[name] = (self._evaluation.get(name, (value,))[0], value)
            is_step = "step_s" in values
            if is_step:
                self._recent.append((step, values))
        if self._live is None:
            self._print(self._step_line(step, values) if is_step else self._evaluation_line(step, values))

    def show(self, content: RenderableType) -> None:
        """Print content permanently above the table."""
        if isinstance(content, str):
            self._terminal.print(Text(legible(content)), soft_wrap=True)
        else:
            self._terminal.print(content)

    def close(self) -> None:
        """Stop redrawing, leaving the last frame."""
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def _stage(self, what: str, began: float) -> Iterator[None]:
        wait = _Wait(what, began, Spinner("dots"))
        with self._lock:
            self._waiting.append(wait)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.remove(wait)

    def _print(self, line: str) -> None:
        # Lines are for files and pipes, where wrapping at a guessed width would only break them.
        self._terminal.print(line, soft_wrap=True, markup=False)

    def _left_s(self) -> float | None:
        """Return the remaining time at the mean pace of recent steps; None before the first step."""
        if not self._recent:
            return None
        pace_s = sum(values["step_s"] for _, values in self._recent) / len(self._recent)
        return max(self._steps - self.done, 0) * pace_s

    def _step_line(self, step: int, values: Mapping[str, float]) -> str:
        left_s = self._left_s()
        parts = [
            f"step {step:>{len(str(self._steps))}}/{self._steps}",
            *(f"{name} {decimal(values.get(metric))}" for name, metric in _figures(values).items()),
            f"response {count(values.get('response_tokens_mean'))} mean {count(values.get('response_tokens_max'))} max",
            *(() if _is_supervised(values) else (f"{count(values.get('generation_tokens_per_s'))} tokens/s",)),
            f"{decimal(values.get('step_s'), 1)} s" + _recovered(values),
            money(values.get("cost_usd")),
            "left " + (clock(left_s) if left_s is not None else "?"),
        ]
        return "  ".join(parts)

    def _evaluation_line(self, step: int, values: Mapping[str, float]) -> str:
        figures = [f"{name.removeprefix(_EVAL)} {decimal(value)}" for name, value in values.items()]
        return "  ".join([f"step {step:>{len(str(self._steps))}}/{self._steps}", "held-out", *figures])

    def _frame(self) -> RenderableType:
        with self._lock:
            parts: list[RenderableType] = [Text(self._title, style="bold"), self._progress()]
            if self._recent:
                parts.append(self._table())
            if self._evaluation:
                parts.append(self._held_out())
            for wait in self._waiting:
                text = Text(f"{wait.what}  {clock(self._now() - wait.began)}", style="dim")
                wait.spinner.update(text=text)
                parts.append(wait.spinner)
            return Group(*parts)

    def _progress(self) -> Table:
        left_s = self._left_s()
        line = Table.grid(padding=(0, 2))
        line.add_row(
            f"step {self.done}/{self._steps}",
            ProgressBar(total=self._steps, completed=self.done, width=_BAR_COLUMNS),
            f"{clock(self._now() - self._began)} so far",
            f"{clock(left_s)} left" if left_s is not None else "",
        )
        return line

    def _table(self) -> Table:
        newest = self._recent[-1][1]
        columns = {name: _cell(metric) for name, metric in _figures(newest).items()}
        columns |= {"response": _cell("response_tokens_mean", None), "longest": _cell("response_tokens_max", None)}
        if not _is_supervised(newest):
            columns["tokens/s"] = _cell("generation_tokens_per_s", None)
        columns |= {"step s": _cell("step_s", 1), "overhead s": _cell("overhead_s", 1)}
        if any(_recovered(values) for _, values in self._recent):
            columns["recovery s"] = _cell("recovery_s", 1)
        if self._terminal.width >= _WIDE and any(_prompts(values) for _, values in self._recent):
            columns["prompts computed"] = _prompts
        columns["cost"] = lambda values: money(values.get("cost_usd"))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("step", *columns):
            table.add_column(title, justify="right")
        for step, values in self._recent:
            cells = [cell(values) for cell in columns.values()]
            table.add_row(str(step), *cells, style="" if step == self.done else "dim")
        return table

    def _held_out(self) -> Text:
        figures = [
            f"{name.removeprefix(_EVAL)} {decimal(first)}" + (f" → {decimal(last)}" if last != first else "")
            for name, (first, last) in self._evaluation.items()
        ]
        return Text("held-out  " + "   ".join(figures))


def _is_supervised(values: Mapping[str, float]) -> bool:
    """Return whether a step learned from written responses."""
    return "loss" in values and "reward_mean" not in values


def _figures(values: Mapping[str, float]) -> dict[str, str]:
    """Return the console metrics by display label."""
    if not _is_supervised(values):
        return {"reward": "reward_mean"}
    pairs = {"accuracy": "preference_accuracy"} if "preference_accuracy" in values else {}
    return {"loss": "loss"} | pairs


def _cell(metric: str, digits: int | None = 3) -> Callable[[Mapping[str, float]], str]:
    """Return a function that formats a step's value of the metric; as a count if `digits` is None."""
    return lambda values: count(values.get(metric)) if digits is None else decimal(values.get(metric), digits)


def _prompts(values: Mapping[str, float]) -> str:
    """Return each function's computed prompt tokens as a ratio to the unique ones: `1.1/1.0/1.0`."""
    unique = {name.removeprefix(_UNIQUE): values[name] for name in values if name.startswith(_UNIQUE) and values[name]}
    shares = (values[f"{PROMPT_TOKENS_COMPUTED}/{function}"] / unique[function] for function in in_order(unique))
    return "/".join(f"{share:.1f}" for share in shares)


def _recovered(values: Mapping[str, float]) -> str:
    recovery_s = values.get("recovery_s", 0.0)
    return f" ({decimal(recovery_s, 1)} s of it recovery)" if recovery_s else ""
