"""The option that all benchmarks have: `--smoke`, one round at the smallest size. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from where import machine


def parsed(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """The arguments of the command line, `smoke` among them. With `--smoke` options default to `smallest`."""
    told = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in smallest.items())
    parser.add_argument("--smoke", action="store_true", help=f"smallest size, to see that it runs: {told}")
    if unknown := smallest.keys() - {action.dest for action in parser._actions}:
        raise ValueError(f"the smallest size has {sorted(unknown)[0]!r}, which is no option of the benchmark")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smallest)
        print("smallest size: these figures say that the benchmark runs, and nothing else", file=sys.stderr)
    return parser.parse_args()


def print_computed(description: str | None, table: Callable[[], str]) -> None:
    """Run the benchmark of a table that is computed, not measured."""
    print(f"computed, not measured on {machine()}")
    parsed(argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter))
    print(table())
