"""The computed change of size of a 7B run: the page has it, and its parts are right by hand."""

from __future__ import annotations

import pytest
from change_computed import parts, table

from fakes.repository import ROOT


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "elastic.md").read_text(), "print it with benchmarks/change_computed.py"


def test_by_hand() -> None:
    """7.62 billion parameters: 91.4 GB of state and 15.2 GB of weights."""
    save, stop, start, restore, load = parts(10e9).values()
    assert save == pytest.approx((12 + 2) * 7.616e9 / 10e9, rel=0.001)
    assert restore == pytest.approx(12 * 7.616e9 / 10e9, rel=0.001)
    assert start == pytest.approx(15 + 2 * 7.616 / 1.75, rel=0.001)
    assert (stop, load) == (5.0, pytest.approx(3.3, abs=0.1))
