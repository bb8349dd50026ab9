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
        help="Override a key, such as `steps=10` or `rewards.0.weight=2`. May be given many times.",
    ),
]

Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engines",
        metavar="NAME",
        help="Compare engines by their published runs: vllm, sglang, tensorrt-llm. Runs draw with vLLM alone.",
    ),
]

Quantizations = Annotated[
    list[str] | None,
    typer.Option("--quantization", metavar="FORMAT", help="Compare values of generation.quantization: off, int8, fp8."),
]

Speculations = Annotated[
    list[str] | None,
    typer.Option(
        "--speculation",
        metavar="METHOD",
        help="Compare values of generation.speculation.method: off, auto, ngram, suffix. Needs a run that speculated.",
    ),
]

SharedPrefixes = Annotated[
    list[str] | None,
    typer.Option("--share-prefixes", metavar="BOOL", help="Compare values of learner.share_prefixes: true, false."),
]

Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, max=1000, help="Most rows, the best first; by default 20, and all of --devices."),
]

Data = Annotated[str, typer.Option("--data", metavar="DIR", help="Folder with runs, database and logs.")]

Database = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="URL", envvar=DATABASE_VARIABLE, help="PostgreSQL; by default SQLite in the data folder."
    ),
]
