"""docs/extending.md shows the files that the tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
OWN = Path(__file__).with_name("own")
BLOCKS = re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0][:40])
def test_a_block_of_the_page_stands_in_a_file(block: str) -> None:
    assert any(block in file.read_text() for file in OWN.rglob("*") if file.suffix in (".py", ".yaml"))


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 3
