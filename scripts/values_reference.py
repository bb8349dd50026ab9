"""Writes the table of the chart's values into docs/kubernetes.md, between its two markers: of the comments in
values.yaml, and for the groups of GPUs, of which there are none by default, of the schema's descriptions.

Run it after a change of the chart's values; `--check` only says whether the page is up to date (exit code 1 if not).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from marked_page import write_part

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "rlhfless"
PAGE = ROOT / "docs" / "kubernetes.md"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
MARK = "# -- "


def reference() -> str:
    """Both tables."""
    text = (CHART / "values.yaml").read_text()
    rows = ["| value | default | |", "|---|---|---|", *_rows(yaml.compose(text), text.splitlines(), "")]
    schema = json.loads((CHART / "values.schema.json").read_text())
    group = schema["properties"]["ray"]["properties"]["gpuGroups"]["items"]
    rows += ["", "Keys of an entry of `ray.gpuGroups`:", "", "| key | | |", "|---|---|---|", *_items(group)]
    return "\n".join(rows)


def _rows(node: Any, lines: list[str], prefix: str) -> Iterator[str]:
    for key, value in node.value:
        name, comment = f"{prefix}{key.value}", _said(lines, key.start_mark.line)
        is_section = isinstance(value, yaml.MappingNode) and value.value and not value.flow_style
        if is_section:
            if comment:
                yield f"| **`{name}`** | | {comment} |"
            yield from _rows(value, lines, f"{name}.")
        else:
            default = value.start_mark.buffer[value.start_mark.index : value.end_mark.index].strip()
            yield f"| `{name}` | `{default}` | {comment} |"


def _said(lines: list[str], line: int) -> str:
    """The comment right above a line, from its mark on."""
    above: list[str] = []
    for text in map(str.strip, reversed(lines[:line])):
        if not text.startswith("#"):
            return ""
        if text.startswith(MARK):
            return " ".join([text.removeprefix(MARK), *reversed(above)]).replace("|", "\\|")
        above.append(text.removeprefix("# "))
    return ""


def _items(schema: dict[str, Any]) -> Iterator[str]:
    for name, item in schema["properties"].items():
        need = "required" if name in schema["required"] else ""
        yield f"| `{name}` | {need} | {item['description']} |"


if __name__ == "__main__":
    sys.exit(write_part(PAGE, BEGIN, END, f"{reference()}\n"))
