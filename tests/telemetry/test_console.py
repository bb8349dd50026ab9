"""What the user sees: the same in a redrawn table and in plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as Terminal
from rich.console import RenderableType

from rlhfless.telemetry.console import Console
from rlhfless.telemetry.terminal import clock, count, decimal, money, parameter_count


class Tty(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def values(reward: float, step_s: float = 4.0) -> dict[str, float]:
    return {
        "reward_mean": reward,
        "response_tokens_mean": 183.4,
        "response_tokens_max": 512.0,
        "generation_tokens_per_s": 1234.0,
        "step_s": step_s,
        "cost_usd": 0.0123,
    }


def text_of(content: RenderableType, width: int = 80) -> str:
    terminal = Terminal(width=width, record=True, file=io.StringIO())
    terminal.print(content)
    return terminal.export_text()


@pytest.mark.parametrize("mode", ["lines", "live"])
def test_without_a_terminal_there_is_one_line_per_step(mode: str) -> None:
    out, now = io.StringIO(), Clock()
    console = Console(mode, "run demo", 20, stream=out, now=now)  # type: ignore[arg-type]
    with console.waiting("starting 2 generation actors"):
        now.now_s += 31
    console.emit(0, {"eval/exact_match_greedy": 0.125})
    with console.stage("step 1"):
        console.emit(1, values(0.25))
    console.emit(2, values(0.375, step_s=6.0))
    console.close()
    assert out.getvalue().splitlines() == [
        "run demo",
        "starting 2 generation actors ...",
        "starting 2 generation actors: done in 31 s",
        "step  0/20  held-out  exact_match_greedy 0.125",
        "step  1/20  reward 0.250  response 183 mean 512 max  1,234 tokens/s  4.0 s  $0.0123  left 1:16",
        "step  2/20  reward 0.375  response 183 mean 512 max  1,234 tokens/s  6.0 s  $0.0123  left 1:30",
    ]


def test_a_step_with_a_fault_says_what_of_its_time_was_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console("lines", "run demo", 20, stream=out)
    console.emit(1, values(0.25) | {"recovery_s": 0.0})
    console.emit(2, values(0.375, step_s=32.7) | {"recovery_s": 30.25})
    first, second = out.getvalue().splitlines()[1:]
    assert "  4.0 s  $0.0123" in first
    assert "  32.7 s (30.2 s of it recovery)  $0.0123" in second
    monkeypatch.setenv("TERM", "xterm-256color")
    live = Console("live", "run demo", 20, stream=Tty())
    live.emit(1, values(0.25) | {"overhead_s": 0.5, "recovery_s": 0.0})
    assert "recovery" not in text_of(live._frame())
    live.emit(2, values(0.375, step_s=32.7) | {"overhead_s": 0.25, "recovery_s": 30.25})
    frame = [line.split() for line in text_of(live._frame(), width=100).splitlines()]
    assert "30.2  $0.0123" in text_of(live._frame())  # the heading wraps, and the figures stay whole
    live.close()
    assert frame[2][-5:] == ["overhead", "s", "recovery", "s", "cost"]
    assert frame[3][-4:] == ["4.0", "0.5", "0.0", "$0.0123"]
    assert frame[4][-4:] == ["32.7", "0.2", "30.2", "$0.0123"]


def test_a_wide_terminal_shows_how_often_prompt_tokens_were_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"prompt_tokens_computed/generation": 1100.0, "prompt_tokens_unique/generation": 1000.0}
    tokens |= {"prompt_tokens_computed/learner": 16_000.0, "prompt_tokens_unique/learner": 1000.0}
    for columns, shown in (("120", True), ("80", False)):
        monkeypatch.setenv("COLUMNS", columns)
        console = Console("live", "run demo", 20, stream=Tty(), now=Clock())
        console.emit(1, values(0.25) | tokens)
        text = text_of(console._frame(), 120)
        assert ("prompts computed" in text) is shown
        assert ("1.1/16.0" in text) is shown


def test_off_says_nothing() -> None:
    out = io.StringIO()
    console = Console("off", "run demo", 2, stream=out)
    with console.waiting("starting"):
        console.emit(1, values(0.5))
    console.show("report")
    console.close()
    assert out.getvalue() == ""


def test_a_wait_that_failed_is_not_called_done() -> None:
    out = io.StringIO()
    console = Console("lines", "run demo", 2, stream=out)
    with pytest.raises(RuntimeError), console.waiting("starting"):
        raise RuntimeError("no device")
    assert "done" not in out.getvalue()


def test_the_live_frame_has_progress_steps_evaluation_and_what_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    now, out = Clock(), Tty()
    console = Console("live", "run demo", 200, stream=out, now=now)
    console.emit(0, {"eval/exact_match_greedy": 0.125})
    for step in range(1, 12):
        now.now_s += 5
        console.emit(step, values(step / 100))
    console.emit(11, {"eval/exact_match_greedy": 0.5})
    with console.stage("step 12"):
        now.now_s += 65
        frame = text_of(console._frame())
    console.close()
    lines = [line.rstrip() for line in frame.splitlines()]
    assert lines[0] == "run demo"
    assert lines[1].startswith("step 11/200")
    assert lines[1].endswith("2:00 so far  12:36 left")  # 189 steps at 4 s
    assert lines[2].split() == [
        *("step", "reward", "response", "longest", "tokens/s"),
        *("step", "s", "overhead", "s", "cost"),
    ]
    assert [line.split()[0] for line in lines[3:11]] == [str(step) for step in range(4, 12)]
    assert lines[10].split() == ["11", "0.110", "183", "512", "1,234", "4.0", "-", "$0.0123"]
    assert lines[11] == "held-out  exact_match_greedy 0.125 → 0.500"
    assert lines[12].endswith("step 12  1:05")
    assert max(map(len, lines)) <= 80
    assert "run demo" in out.getvalue()


def test_numbers_as_people_read_them() -> None:
    assert [clock(s) for s in (0, 31.4, 59.6, 271, 4325)] == ["0 s", "31 s", "1:00", "4:31", "1:12:05"]
    assert [money(usd) for usd in (None, 0.01234, 1.005, 1234.5)] == ["-", "$0.0123", "$1.00", "$1,234.50"]
    assert (count(1234.4), count(None)) == ("1,234", "-")
    assert (decimal(0.4125), decimal(12.34, 1), decimal(None)) == ("0.412", "12.3", "-")
    assert (decimal(-0.0004), decimal(-0.0006)) == ("0.000", "-0.001")
    assert [parameter_count(parameters) for parameters in (484e3, 33.4e6, 494e6, 70.6e9)] == [
        "0.484 M",
        "33.4 M",
        "0.494 B",
        "70.6 B",
    ]


def test_a_resumed_run_shows_the_step_and_the_time_of_all_its_attempts_at_once() -> None:
    out, now = io.StringIO(), Clock()
    console = Console("lines", "run demo", 20, stream=out, now=now)
    assert console.done == 0
    console.resumed(12, 3, 3600.0)
    assert console.done == 12
    assert out.getvalue().splitlines() == ["run demo", "step 12/20  resumed, attempt 3; earlier ones took 1:00:00"]
    now.now_s += 60
    frame = text_of(console._frame())
    assert "step 12/20" in frame
    assert "1:01:00 so far" in frame
    console.emit(13, values(0.5))
    assert console.done == 13
    assert "step 13/20" in out.getvalue()
