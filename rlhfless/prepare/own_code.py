"""The files of the user's own code that a spec names, with those that it imports from its own folder."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rlhfless.spec.imports import TargetError, load_target

PACKAGE = "rlhfless"
"""Code of the package itself changes with its version."""


def code_files(target: str) -> Mapping[str, str]:
    """Digests of the module of an import path and of the modules beside it that it imports, directly or not, by their
    paths below their folder. Empty for code of rlhfless, and for a target that cannot be imported."""
    module = target.partition(":")[0]
    top = module.partition(".")[0]
    if top == PACKAGE:
        return {}
    with suppress(TargetError):
        load_target(target)  # searches the current folder, too
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return {}
    if spec is None or spec.origin is None:
        return {}
    origin = Path(spec.origin)
    root = origin.parent.parent if spec.submodule_search_locations else origin.parent
    installed = "site-packages" in root.parts or "dist-packages" in root.parts
    found: dict[Path, str] = {}
    _follow(root, module, top if installed else None, found)
    return {str(file.relative_to(root)): digest for file, digest in sorted(found.items())}


def _follow(root: Path, module: str, within: str | None, found: dict[Path, str]) -> None:
    """Add the files of a module, of its packages, and of what they import from `root`; with `within` only from that
    package."""
    parts = module.split(".")
    if within is not None and parts[0] != within:
        return
    for length in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:length])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file() and file not in found:
                content = file.read_bytes()
                found[file] = hashlib.sha256(content).hexdigest()
                package = parts[:length] if file.name == "__init__.py" else parts[: length - 1]
                for name in _imported(content, package):
                    _follow(root, name, within, found)


def _imported(content: bytes, package: list[str]) -> Iterator[str]:
    """The modules that a file of a package may import, anywhere in it."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [*base, *(node.module.split(".") if node.module else [])]
            if names:
                yield ".".join(names)
            yield from (".".join([*names, alias.name]) for alias in node.names if alias.name != "*")
