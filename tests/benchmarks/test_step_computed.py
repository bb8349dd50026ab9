"""The computed step of 7B: the page has it as the function gives it, and its parts are right by hand."""

from __future__ import annotations

import pytest
from step_computed import PARTS, attention, elementwise, head, products, step_s, table

from fakes.repository import ROOT

TOKENS = 1024 * 1026 / 8


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "gpus.md").read_text(), "print it with benchmarks/step_computed.py"


def test_by_hand() -> None:
    assert products(True) == pytest.approx(8 * 7.07e9 * TOKENS / (0.65 * 989e12), rel=0.001)
    assert head(False) == pytest.approx(1024 * 770 / 8 * 152_064 * 94 / (0.8 * 3.35e12))
    assert elementwise(False) == pytest.approx(7 * 249_856 * 28 * TOKENS / (0.8 * 3.35e12))
    assert attention(True) == pytest.approx(4.5 * 4 * 513 * 3584 * 28 * TOKENS / 350e12)


def test_the_step_is_within_the_bound_and_nothing_became_slower() -> None:
    """Issue 47: 37 to 42 s, and 28 after."""
    assert 37 <= step_s(False) <= 42
    assert step_s(True) <= 28
    assert all(part(True) <= part(False) for part in PARTS.values())
