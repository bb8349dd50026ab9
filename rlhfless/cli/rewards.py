"""`rlhfless rewards`: what rewards say about responses, before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfless.cli.options import Overrides, SpecFile

if TYPE_CHECKING:
    from rlhfless.loop.trial import Trial
    from rlhfless.spec import RunSpec

_RESPONSE_CHARS = 32


def register(app: typer.Typer) -> None:
    """Add the commands."""
    rewards = typer.Typer(help="Look at the rewards of a spec.", no_args_is_help=True)
    rewards.command("test")(try_out)
    # A group with one command would be that command.
    rewards.callback()(lambda: None)
    app.add_typer(rewards, name="rewards")


def try_out(
    spec: SpecFile,
    samples: Annotated[
        Path,
        typer.Argument(
            metavar="SAMPLES",
            help="JSONL or Parquet with `response`, and either `prompt` and the data set's columns, or a `prompt_id`.",
        ),
    ],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Score responses with the rewards of a spec, and show every part."""
    from rlhfless.loop.trial import try_rewards
    from rlhfless.spec.load import load_spec

    loaded = load_spec(spec, overrides or ())
    trial = try_rewards(loaded, samples)
    if as_json:
        typer.echo(json.dumps(_as_json(loaded, trial), indent=2))
    else:
        _show(loaded, trial)


def _show(spec: RunSpec, trial: Trial) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    summary = _as_json(spec, trial)["summary"]
    names = [*summary["parts"]]
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("sample", footer="mean\nstd")
    table.add_column("response")
    for name in [*names, "total"]:
        figures = summary["total"] if name == "total" else summary["parts"][name]
        footer = "\n".join(_number(figures[key]) for key in ("mean", "std"))
        table.add_column(name, justify="right", footer=footer, overflow="fold")
    table.add_column("failure", overflow="fold")
    for place, sample, score in zip(trial.places, trial.samples, trial.scores, strict=True):
        text = " ".join(sample.response.split())
        short = text if len(text) <= _RESPONSE_CHARS else text[: _RESPONSE_CHARS - 1] + "…"
        causes = "; ".join(f"{name}: {cause}" for name, cause in score.failures.items())
        values = [_number(score.parts.get(name)) for name in names]
        table.add_row(place, Text(short), *values, _number(score.total), Text(causes, style="red"))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{summary['samples']} samples, {summary['failed']} failed, {summary['samples_per_s']:.1f} samples/s "
        f"({summary['wall_s']:.2f} s)"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _as_json(spec: RunSpec, trial: Trial) -> dict[str, Any]:
    columns = {part.label: [score.parts.get(part.label) for score in trial.scores] for part in spec.rewards}
    rows = [
        {
            "place": place,
            "prompt_id": sample.prompt_id,
            "sample_index": sample.sample_index,
            "parts": dict(score.parts),
            "total": score.total,
            "failures": dict(score.failures),
        }
        for place, sample, score in zip(trial.places, trial.samples, trial.scores, strict=True)
    ]
    summary = {
        "samples": len(rows),
        "failed": sum(bool(score.failures) for score in trial.scores),
        "wall_s": trial.wall_s,
        "samples_per_s": len(rows) / trial.wall_s if trial.wall_s else 0.0,
        "parts": {name: _mean_and_std(values) for name, values in columns.items()},
        "total": _mean_and_std([score.total for score in trial.scores if not score.failures]),
    }
    return {"samples": rows, "summary": summary}


def _mean_and_std(values: list[float | None] | list[float]) -> dict[str, float | None]:
    """Over the samples that have a value."""
    import numpy as np

    there = [value for value in values if value is not None]
    if not there:
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(there)), "std": float(np.std(there))}
