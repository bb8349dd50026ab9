"""Lines and paths stay whole: in pipes and files always, and paths in a terminal, too."""

from __future__ import annotations

import io

import pytest
from rich.console import Group

from rlhfless.cli.tables import table
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.terminal import Prose, Terminal, whole

PATH = "/data/" + "a-very-long-folder/" * 9 + "trace"
SPACED = "/data/my runs/" + "a very long folder/" * 9 + "trace"


def printed(content: object, *, terminal: bool, columns: int = 80) -> str:
    stream = io.StringIO()
    Terminal(file=stream, force_terminal=terminal, width=columns, color_system=None).print(content)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [20, 80, 200])
@pytest.mark.parametrize("path", [PATH, SPACED])
def test_a_path_is_one_line_of_a_terminal_of_any_width(path: str, columns: int) -> None:
    line = whole(f"trace  {path}")
    for content in (line, Group(line), Group("", Group(line))):
        assert printed(content, terminal=True, columns=columns).lstrip("\n") == f"trace  {path}\n"


@pytest.mark.parametrize("columns", [20, 80])
def test_prose_wraps_between_words_and_keeps_paths(columns: int) -> None:
    lines = printed(Prose(f"{'word ' * 40}{PATH} {'word ' * 40}"), terminal=True, columns=columns).splitlines()
    assert [line for line in lines if len(line) > columns] == [PATH]
    assert " ".join(lines).split() == ["word"] * 40 + [PATH] + ["word"] * 40


@pytest.mark.parametrize("columns", ["20", "80", None])
def test_nothing_is_broken_or_cut_in_a_pipe(monkeypatch: pytest.MonkeyPatch, columns: str | None) -> None:
    """Whatever COLUMNS says: a script that reads lines reads them whole."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    stream = io.StringIO()
    rows = table("path", "note", texts=2)
    rows.add_row(PATH, "word " * 100)
    Terminal(file=stream).print(Group(rows, Prose("word " * 100 + SPACED), whole(SPACED)))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[1:] == [f"{PATH}  {('word ' * 100).strip()}", "word " * 100 + SPACED, SPACED]


@pytest.mark.parametrize("columns", [20, 80])
def test_a_path_in_quotes_keeps_its_spaces(columns: int) -> None:
    lines = printed(Prose(f"refused: {SPACED!r}: no such file"), terminal=True, columns=columns).splitlines()
    assert any(repr(SPACED) in line for line in lines)


def test_markup_of_a_path_is_text() -> None:
    assert printed(Prose("no file /a[red]b"), terminal=True) == "no file /a[red]b\n"


def test_the_report_of_a_run_in_a_file_keeps_its_paths() -> None:
    stream = io.StringIO()
    console = Console("lines", "run demo", 3, stream)
    console.show(Group(whole(f"checkpoint  {PATH}"), Prose(f"it was at {PATH} before")))
    assert f"checkpoint  {PATH}\nit was at {PATH} before\n" in stream.getvalue()
