"""requirements/gpu.txt installs cleanly: read from the table of its wheels, which scripts/gpu_wheels.py writes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fakes.repository import REQUIREMENTS, pinned

HARMLESS = {"build_backend.py", "opencensus/__init__.py", "opencensus/common/__init__.py"}
"""The first was packed by mistake twice, and is never imported; the others have the same content in both wheels."""

Rows = dict[str, tuple[str, list[str], list[Requirement]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """By wheel: its version, where it puts files, and what it needs."""
    found: Rows = {}
    for line in (REQUIREMENTS / "gpu-wheels.tsv").read_text().splitlines()[1:]:
        wheel, places, needs = line.split("\t")
        name, _, version = wheel.partition("==")
        found[name] = version, places.split(), [Requirement(need) for need in needs.split("; ") if need]
    return found


def test_the_table_is_of_the_pinned_list(rows: Rows) -> None:
    versions = {name: version for name, (version, *_) in rows.items()}
    assert versions == pinned("gpu.txt"), "run scripts/gpu_wheels.py"


def test_no_two_wheels_share_a_path(rows: Rows) -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for name, (_, places, _) in rows.items():
        for place in places:
            owners[place.removesuffix("/")].add(name)
    for place in list(owners):  # a file of one wheel in a folder that another has for itself
        for folder in PurePosixPath(place).parents:
            if str(folder) in owners:
                owners[place] |= owners[str(folder)]
    assert {place: names for place, names in owners.items() if len(names) > 1}.keys() == HARMLESS


def test_each_wheel_finds_what_it_needs(rows: Rows) -> None:
    missing = [
        f"{name} needs {need}, and {need.name} is {rows[found][0] if found in rows else 'not pinned'}"
        for name, (_, _, needs) in rows.items()
        for need in needs
        for found in [canonicalize_name(need.name)]
        if found not in rows or not need.specifier.contains(rows[found][0], prereleases=True)
    ]
    assert missing == []
