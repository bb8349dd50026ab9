"""A name of a class means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import rlhfless

TREE = Path(rlhfless.__file__).parent.parent


def test_no_public_class_is_called_as_another() -> None:
    files = [path for room in ("rlhfless", "functions", "sim") for path in (TREE / room).rglob("*.py")]
    # A room that `rlhfless` links to is read once.
    trees = [ast.parse(path.read_text()) for path in {path.resolve() for path in files}]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert len(names) > 500
    assert [name for name, times in names.items() if times > 1 and not name.startswith("_")] == []
