"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhfless.control.settings import DATABASE_VARIABLE

OptionalSpecFile = Annotated[
    Path | None, typer.Argument(metavar="SPEC", help="Spec of the run: a YAML or JSON file.", show_default=False)
]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="Spec of the run: a YAML or JSON file.")]

TraceFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the `trace` in it.")]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, such as `steps=10` or `rewards.0.weight=2`. Repeatable.",
    ),
]

Quantizations = Annotated[
    list[str] | None,
    typer.Option("--quantization", metavar="FORMAT", help="Values of generation.quantization to compare: off, fp8."),
]

Speculations = Annotated[
    list[str] | None,
    typer.Option(
        "--speculation",
        metavar="METHOD",
        help="Values of generation.speculation.method to compare: off, auto, ngram, suffix (with --lengths-of).",
    ),
]

SharedPrefixes = Annotated[
    list[str] | None,
    typer.Option("--share-prefixes", metavar="BOOL", help="Values of learner.share_prefixes to compare: true, false."),
]

Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, max=1000, help="Maximum number of rows, best first. Default: 20, or all of --devices."
    ),
]

Data = Annotated[str, typer.Option("--data", metavar="DIR", help="Folder with runs, database and logs.")]

Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        envvar=DATABASE_VARIABLE,
        help="PostgreSQL URL. Default: SQLite in the data folder.",
    ),
]
