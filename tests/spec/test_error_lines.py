"""The first line of an error, also of one that says nothing."""

from __future__ import annotations

import pytest

from rlhfless.util.errors import class_and_line, first_line


@pytest.mark.parametrize(
    ("error", "line", "with_class"),
    [
        (ValueError("\n no such file\nand more"), "no such file", "ValueError: no such file"),
        (RuntimeError(" "), "RuntimeError", "RuntimeError"),
        (KeyError(), "KeyError", "KeyError"),
    ],
)
def test_the_first_line(error: Exception, line: str, with_class: str) -> None:
    assert first_line(error) == line
    assert class_and_line(error) == with_class
