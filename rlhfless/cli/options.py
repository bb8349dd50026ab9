"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OptionalSpecFile = Annotated[
    Path | None, typer.Argument(metavar="SPEC", help="Spec of the run: a YAML or JSON file.", show_default=False)
]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="Spec of the run: a YAML or JSON file.")]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, such as `steps=10` or `rewards.0.weight=2`. May be given many times.",
    ),
]
