"""`rlhfless rewards`: the scores of given responses, before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfless.cli.options import Overrides, SpecFile
from rlhfless.util.text import legible

if TYPE_CHECKING:
    from rlhfless.prepare.reward_trial import Trial
    from rlhfless.spec import RunSpec

_FEWEST_CHARS = 8
_RESPONSE_CHARS = 32


rewards = typer.Typer(help="Try out the rewards of a spec.", no_args_is_help=True)
rewards.callback()(lambda: None)  # without it, typer would turn a group of one command into that command


@rewards.command("test")
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
    from rlhfless.prepare.reward_trial import try_rewards
    from rlhfless.spec.errors import InputError, Problem
    from rlhfless.spec.load import load_spec

    loaded = load_spec(spec, overrides or ())
    if loaded.supervised:
        what = f"a run of type {loaded.type} has none"
        hint = "test the rewards of a spec of type rlhf; `rlhfless data show` shows what this run learns"
        raise InputError(str(spec), [Problem("rewards", what, hint)])
    trial = try_rewards(loaded, samples)
    if as_json:
        typer.echo(json.dumps(_as_json(loaded, trial), indent=2))
    else:
        _show(loaded, trial)


def _show(spec: RunSpec, trial: Trial) -> None:
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from rlhfless.telemetry.terminal import Prose, Terminal

    summary = _as_json(spec, trial)["summary"]
    names = [*summary["parts"]]
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("sample", footer="mean\nstd", no_wrap=True)
    table.add_column("response", no_wrap=True, overflow="ellipsis", max_width=1)
    for name in [*names, "total"]:
        figures = summary["total"] if name == "total" else summary["parts"][name]
        footer = "\n".join(_number(figures[key]) for key in ("mean", "std"))
        table.add_column(name, justify="right", footer=footer, no_wrap=True)
    for place, sample, score in zip(trial.places, trial.samples, trial.scores, strict=True):
        values = [_number(score.parts.get(name)) for name in names]
        number = place.replace(":", " ").split()[-1]
        response = legible(" ".join(sample.response.split()))
        table.add_row(legible(number), Text(response), *values, _number(score.total))
    console = Terminal()
    # One line per sample: on a narrow terminal the response is cut, and the numbers are not.
    left = console.width - Measurement.get(console, console.options.update(width=10_000), table).maximum
    table.columns[1].max_width = min(max(left, _FEWEST_CHARS), _RESPONSE_CHARS)
    console.print(table)
    for place, score in zip(trial.places, trial.scores, strict=True):
        for name, cause in score.failures.items():
            console.print(Prose(f"{place}: {name} failed: {cause}", style="red"))
    console.print(
        f"{summary['samples']} samples, {summary['failed']} failed, {summary['samples_per_s']:.1f} samples/s "
        f"({summary['wall_s']:.2f} s)"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


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
    """Return mean and standard deviation of the samples that have a value."""
    import numpy as np

    rewards = [value for value in values if value is not None]
    if not rewards:
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(rewards)), "std": float(np.std(rewards))}
