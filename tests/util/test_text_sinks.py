"""Text from outside, through the doors by which it enters, into all that is written."""

from __future__ import annotations

import io
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from fakes.builders import ANY_TEXT, drawn
from rlhfless.records import Decision, Prompt, Rollout, VersionSpan
from rlhfless.records.journal import Journal
from rlhfless.records.traces import TraceMeta, TraceWriter, read_trace
from rlhfless.rewards import Failed, RewardError, combined
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.logs import RunLog
from rlhfless.util.text import legible, storable

META = TraceMeta("run", 1, {}, {}, {})
BYTE = os.fsdecode(b"caf\xe9")
"""A name in Latin-1, as Python reads it: with a lone surrogate."""


@pytest.fixture(scope="module", autouse=True)
def _no_log_may_fail() -> Iterator[None]:
    """A handler that cannot write says so on stderr only; here it is an error."""

    def fail(_: logging.Handler, record: logging.LogRecord) -> None:
        raise AssertionError(f"{record.name} could not be logged")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Handler, "handleError", fail)
        yield


def rollout(text: str, prompt_id: str = "p") -> Rollout:
    return drawn(prompt_id, 0, [1, 2], text=text, spans=(VersionSpan("v", 0, 2),))


@given(ANY_TEXT, ANY_TEXT)
def test_a_reward_may_fail_with_any_text_and_the_trace_keeps_it(cause: str, fault: str) -> None:
    (score,) = combined({"judge": 1.0}, [[Failed(cause)]], 1, "drop")
    with tempfile.TemporaryDirectory() as folder:
        with TraceWriter(folder, META, record_tokens=True) as writer:
            writer.add_prompt(Prompt("p", (1,), cause, {fault: cause}))
            writer.add_rollout(1, rollout(cause), score, 3)
            writer.add(Decision(1, 0.0, "recover", "redo the step", {"fault": legible(fault)}))
        trace = read_trace(folder)
    assert trace.rollouts[0].reward_failures == {"judge": legible(cause)}
    assert trace.rollouts[0].text == trace.prompts[0].text == storable(cause)
    assert trace.prompts[0].columns == {storable(fault): storable(cause)}
    assert trace.decisions[0].inputs == {"fault": legible(fault)}
    assert str(RewardError("judge", cause)).encode()


@given(ANY_TEXT, ANY_TEXT.filter(bool))
def test_the_journal_gives_back_what_it_was_given_and_sqlite_sees_all_of_it(text: str, prompt_id: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite")
        journal.begin_attempt()
        journal.add(1, [rollout(storable(text), storable(prompt_id))])
        (found,) = journal.rollouts(1)
        journal.close()
        database = sqlite3.connect(Path(folder) / "journal.sqlite")
        assert database.execute("SELECT length(text), length(prompt_id) FROM rollouts").fetchone() == (
            len(found.text),
            len(found.prompt_id),
        )
        database.close()
    assert (found.text, found.prompt_id) == (storable(text), storable(prompt_id))


@given(texts=st.lists(ANY_TEXT, max_size=5))
def test_the_log_takes_every_text(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
        patch.setattr("sys.stderr", terminal)
        log = RunLog(Path(folder), "run")
        for text in texts:
            logging.getLogger("rlhfless.test").warning("reward failed: %s", text)
        log.close()
        terminal.flush()
        for written in (log.path.read_text("utf-8"), terminal.buffer.getvalue().decode()):  # type: ignore[attr-defined]
            assert written.count("reward failed: ") >= len(texts)
            assert all(legible(text) in written for text in texts)


@given(ANY_TEXT, st.sampled_from(["ascii", "utf-8"]), st.sampled_from(["live", "lines"]))
def test_the_console_takes_every_text_in_every_encoding(text: str, encoding: str, mode: str) -> None:
    class Tty(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    stream = Tty(io.BytesIO(), encoding=encoding, newline="\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color" if mode == "live" else "dumb")
        console = Console(mode, text, 3, stream=stream)  # type: ignore[arg-type]
        with console.waiting(f"recovering: {text}"):
            console.emit(0, {f"eval/{text}": 0.5})
            console.show(f"warning: {text}")
            console.show(Text(text))
        console.close()
    stream.flush()
    written = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    if mode == "lines" and text.isascii() and text.isprintable():
        assert f"recovering: {text} ...\n" in written


def test_what_a_text_from_outside_tells_a_terminal_is_shown_and_not_done(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console("lines", "run", 1, stream=stream)
    console.show("warning: [red]x[/red] \x1b[2J")
    assert stream.getvalue().splitlines()[1:] == ["warning: [red]x[/red] \\x1b[2J"]
    log = RunLog(tmp_path, "run")
    logging.getLogger("rlhfless.test").warning("judge: \x1b]0;title\x07 \udcff")
    log.close()
    assert log.path.read_text("utf-8").endswith("judge: \\x1b]0;title\\x07 \\udcff\n")


def test_a_trace_is_read_from_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", META, record_tokens=False) as writer:
        writer.add(Decision(1, 0.0, "plan", "all", {}))
    (tmp_path / "run").rename(tmp_path / BYTE)
    assert read_trace(tmp_path / BYTE).decisions[0].kind == "plan"
