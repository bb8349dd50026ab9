"""Links of README and docs lead somewhere, and every page is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fakes.repository import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_index_has_every_page() -> None:
    linked = set(LINK.findall((DOCS / "README.md").read_text("utf-8")))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} == linked


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120
