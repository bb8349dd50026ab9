"""Parse text into plain data, with the line of every key.

YAML is read by the core schema of YAML 1.2, not PyYAML's 1.1: `off` and `no` are strings, `1e-6` is a number, `010` is
ten and dates stay strings. JSON is read as JSON. Duplicate keys are refused, because one of them would silently have no
effect. Deliberately unsupported: merge keys (`<<`), tags and multiple documents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rlhfless.spec.errors import Problem

Path = tuple[str | int, ...]

MOST_DEPTH = 64
"""Maximum nesting of sections and lists. The deepest parts of a spec are JSON schemas."""

MOST_VALUES = 100_000
MOST_CHARACTERS = 4 << 20
"""Maximum size of a document with its aliases expanded. 400 bytes of nested aliases can expand beyond any memory."""

# YAML in braces seldom starts with a quoted key.
_JSON_START = re.compile(r'\s*\{\s*["}]')

_TAG = "tag:yaml.org,2002:"
# https://yaml.org/spec/1.2.2/#1032-tag-resolution, with the characters each form can start with.
_CORE_SCHEMA = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (PyYAML's own attribute)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Raise DocumentError before Python's own stack overflows."""
        if self._depth > MOST_DEPTH:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise DocumentError(_too_deep(f"line {event.start_mark.line + 1}"))
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `_Loader` reads back: it quotes strings that the loader would read as numbers."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Escape line breaks and similar characters, which a YAML reader would fold."""
    return dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _name, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data, and where the user wrote each path (`line 12`)."""

    data: Any
    origins: dict[Path, str]


class DocumentError(ValueError):
    """The text cannot be parsed. Carries one `Problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def parse(text: str) -> Document:
    """Parse a text as JSON or YAML. Raises DocumentError."""
    return _parse_json(text) if _JSON_START.match(text) else _parse_yaml(text)


def parse_value(text: str) -> Any:
    """Parse the value of an override, such as `3`, `null`, `[a, b]` or `some text`. Raises DocumentError."""
    return parse(text).data


def dump(data: Any) -> str:
    """Return YAML that `parse` reads back as the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _parse_yaml(text: str) -> Document:
    _require_short(len(text), "")
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise DocumentError(_syntax_problem(error)) from error
    built = _Built()
    return Document(None if root is None else built.value(root, ()), built.origins)


def _parse_json(text: str) -> Document:
    _require_short(len(text), "")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DocumentError(Problem("", f"not JSON: {error.msg}", origin=place)) from error
    except RecursionError:
        return _parse_yaml(text)  # reports the line
    except ValueError as error:  # a number of more than 4,300 digits
        raise DocumentError(Problem("", f"not JSON: {error}")) from error
    # JSON is YAML except for tabs between tokens, so the YAML parser finds lines and duplicate keys.
    return Document(data, _parse_yaml(text.replace("\t", " ")).origins)


class _Built:
    """Plain data from YAML nodes, and where each value was written. Aliases are expanded and count each time."""

    def __init__(self) -> None:
        self.origins: dict[Path, str] = {}
        self._values = 0
        self._characters = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Raises DocumentError."""
        self._count(node, path)
        self.origins.setdefault(path, _line(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return _scalar(node)

    def _count(self, node: yaml.Node, path: Path) -> None:
        if len(path) > MOST_DEPTH:
            raise DocumentError(_too_deep(_line(node)))
        self._values += 1
        if isinstance(node, yaml.ScalarNode):
            self._characters += len(node.value)
        if self._values > MOST_VALUES:
            what = f"more than {MOST_VALUES:,} values, with each alias (`*name`) written out"
            raise DocumentError(Problem("", what, "write fewer", _line(node)))
        _require_short(self._characters, _line(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise DocumentError(Problem("", "a key must be a text", origin=_line(key_node)))
            child = (*path, key)
            if key in data:
                what = f"the key is given twice, first in {self.origins[child]}"
                raise DocumentError(Problem(dotted(child), what, "keep one of them", _line(key_node)))
            self.origins[child] = _line(key_node)
            data[key] = self.value(value_node, child)
        return data


def _require_short(characters: int, origin: str) -> None:
    """Raises DocumentError."""
    if characters > MOST_CHARACTERS:
        raise DocumentError(Problem("", f"more than {MOST_CHARACTERS:,} characters", "write less", origin))


def _too_deep(origin: str) -> Problem:
    what = f"nested too deeply (more than {MOST_DEPTH} levels), or an alias that holds itself"
    return Problem("", what, "write it flat", origin)


def _scalar(node: yaml.Node) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        try:
            return int(text, base)
        except ValueError as error:  # more than 4,300 digits, Python's limit
            what = f"a number of {len(text):,} characters"
            raise DocumentError(Problem("", what, "write a smaller one", _line(node))) from error
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if kind == "str":
        return text
    raise DocumentError(Problem("", f"the tag {node.tag!r} is not supported", "leave it out", _line(node)))


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return Problem("", f"not YAML: {error}")
    context = getattr(error, "context", None)
    what = f"not YAML: {f'{context}, ' if context else ''}{getattr(error, 'problem', None) or error}"
    hint = "indent with blanks, not with tabs" if "'\\t'" in what else ""
    return Problem("", what, hint, f"line {mark.line + 1}, column {mark.column + 1}")


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value in plain data with its path; a section or list comes before its content."""
    yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from walk(item, (*path, key))


def dotted(path: Path) -> str:
    """Return `("rewards", 0, "weight")` as `rewards.0.weight`."""
    return ".".join(map(str, path))
