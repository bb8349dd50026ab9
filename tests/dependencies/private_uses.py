"""Finds, in our sources, the uses of private names of dependencies. Texts that we recognise cannot be found so."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("rlhfless", "functions", "sim")

INTERNAL = (
    "fastapi.dependencies",
    "ray.core",
    "tensorboard",
    "torch.distributed.rendezvous",
    "transformers.core_model_loading",
    "transformers.dynamic_module_utils",
    "transformers.integrations",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models",
)
"""Modules whose names have no underscore, and whose dependencies promise nothing of them. Of vLLM these are all names
that its package itself does not export."""

VARIABLE = re.compile(r"(?:VLLM|RAY|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|GLOO|TRANSFORMERS|NUMBA)_\w+")
"""Environment variables that dependencies read."""

NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "_replaced"}
"""Functions that take an attribute by its name; the last one is ours (functions/loading.py)."""


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """A private name in one of our files: `what` is dotted as far as the file tells what it belongs to."""

    file: str
    line: int
    what: str


def uses() -> list[Use]:
    """All uses in our sources."""
    return sorted({use for file in sources() for use in Finder(file).uses()})


@cache
def sources() -> tuple[Path, ...]:
    """Our files; `rlhfless/functions` and `rlhfless/sim` are links to the folders beside it."""
    return tuple(file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")) if file.resolve() == file)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Private names that a file defines: functions, variables, parameters, and attributes of its objects."""
    names: set[str] = set()
    for node in ast.walk(tree_of(file)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return frozenset(name for name in names if name.startswith("_"))


@cache
def exported_by_vllm() -> frozenset[str]:
    """The names that vLLM's package exports, read without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    lists = (
        node.value
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return frozenset(ast.literal_eval(next(lists)))


def is_dependency(name: str) -> bool:
    """Whether a dotted name begins with a package that is neither ours nor Python's."""
    root = name.partition(".")[0]
    return root not in sys.stdlib_module_names and root not in (*ROOMS, "")


def is_private(name: str) -> bool:
    """Whether a dotted name of a dependency is private to it."""
    if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
        return True
    if name.startswith("vllm."):
        return name.split(".")[1] not in exported_by_vllm()
    return any(name == module or name.startswith(f"{module}.") for module in INTERNAL)


class Finder:
    """Finds the uses in one file."""

    def __init__(self, file: Path) -> None:
        self._file = str(file.relative_to(ROOT))
        self._tree = tree_of(file)
        self._imported: dict[str, str] = {}
        """Names in the file, and the dotted names in dependencies that they stand for."""
        self._own = set(defined_in(file))
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                self._imported |= {
                    alias.asname or alias.name.partition(".")[0]: alias.name
                    if alias.asname
                    else alias.name.partition(".")[0]
                    for alias in node.names
                    if is_dependency(alias.name)
                }
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                if is_dependency(node.module):
                    self._imported |= {
                        alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
                    }
                else:
                    self._own |= {name for alias in node.names for name in _defined_at(node.module, alias.name)}

    def uses(self) -> Iterator[Use]:
        """As they are met."""
        for node in ast.walk(self._tree):
            for what in self._found(node):
                yield Use(self._file, node.lineno, what)  # type: ignore[attr-defined]

    def _found(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if is_dependency(alias.name) and is_private(alias.name))
            case ast.ImportFrom(module=str(module), names=names) if is_dependency(module):
                yield from (name for alias in names if is_private(name := f"{module}.{alias.name}"))
            case ast.Attribute(attr=name) if self._is_foreign(name):
                yield self._dotted(node)
            case ast.Call(func=function, keywords=keywords, args=arguments):
                yield from (
                    f"{self._dotted(function)}.{key.arg}" for key in keywords if self._is_foreign(key.arg or "")
                )
                if isinstance(function, ast.Name) and function.id in BY_NAME and len(arguments) > 1:
                    yield from self._named(arguments[1])
            case ast.Dict(keys=keys):
                yield from (name for key in keys if key is not None for name in self._named(key))
            case ast.Assign(targets=targets):
                yield from (name for target in targets for name in self._patched(target))
            case ast.Constant(value=str(text)):
                if VARIABLE.fullmatch(text) or (re.fullmatch(r"\w+(\.\w+)+", text) and self._is_private_module(text)):
                    yield text

    def _is_foreign(self, name: str) -> bool:
        private = name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE
        return private and name not in self._own and name != "_exit"  # os._exit, which Python documents

    def _named(self, node: ast.expr) -> Iterator[str]:
        """A private name in a text."""
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and re.fullmatch(r"_[a-z]\w*", value) and self._is_foreign(value):
            yield value

    def _patched(self, target: ast.expr) -> Iterator[str]:
        """What is assigned to in a dependency."""
        if isinstance(target, ast.Tuple):
            yield from (name for each in target.elts for name in self._patched(each))
        elif isinstance(target, ast.Attribute) and _root(target) in self._imported:
            yield self._dotted(target)

    def _dotted(self, node: ast.expr) -> str:
        """The name of an expression; of an object whose kind is not known the attribute alone."""
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}" if _root(node) in self._imported else node.attr
        return self._imported.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def _is_private_module(self, text: str) -> bool:
        return importlib.util.find_spec(text.partition(".")[0]) is not None and is_dependency(text) and is_private(text)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _defined_at(module: str, name: str) -> frozenset[str]:
    """Private names that a module of ours, or the one of that name in it, defines; and those of its classes' bases."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py", path / f"{name}.py")
    return frozenset(found for file in files if file.is_file() for found in _inherited_in(file.resolve()))


@cache
def _inherited_in(file: Path) -> frozenset[str]:
    """Private names that a file defines, and that its classes inherit from others of ours."""
    classes = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)]
    bases = {
        name.id for node in classes for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)
    }
    imports = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.ImportFrom) and node.module]
    return defined_in(file).union(
        *(
            _defined_at(str(node.module), alias.name)
            for node in imports
            for alias in node.names
            if alias.name in bases and not is_dependency(str(node.module))
        )
    )
