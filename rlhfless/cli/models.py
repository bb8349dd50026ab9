"""`rlhfless models`: models and tasks that come with rlhfless, built on this machine, and models of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlhfless.bundled.warm_start import WarmStartProgress


def register(app: typer.Typer) -> None:
    """Add the commands."""
    models = typer.Typer(help="Models that come with rlhfless, and models that runs have made.", no_args_is_help=True)
    models.command()(tiny)
    models.command()(export)
    app.add_typer(models, name="models")


def tiny(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")] = Path("tiny"),
    seed: Annotated[int, typer.Option(help="Seed of the model and of the data.")] = 0,
    untaught: Annotated[
        bool, typer.Option("--untaught", help="Random weights, in seconds: to see that a run goes through.")
    ] = False,
) -> None:
    """Build a tiny model with a counting task: a first run in minutes, without a GPU or a download."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from transformers.utils.logging import disable_progress_bar

    from rlhfless import bundled

    disable_progress_bar()  # type: ignore[no-untyped-call]  # ours is enough
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("teaching the model to count", total=None)

        def show(progress: WarmStartProgress) -> None:
            description = f"teaching the model to count (loss {progress.loss:.3f})"
            bar.update(task, total=progress.steps, completed=progress.step, description=description)

        recipe = bundled.Recipe(warm_start=bundled.WarmStartRecipe(steps=0)) if untaught else bundled.Recipe()
        paths = bundled.build(out, seed=seed, recipe=recipe, on_progress=show)
    typer.echo(f"{paths.folder} holds model/, {paths.train.name} and {paths.held_out.name}")


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Its folder or URL, or a run's folder: its newest one.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; must not exist.")],
) -> None:
    """Copy the model and tokenizer of a checkpoint, in Hugging Face format, without what a learner goes on from."""
    from rlhfless.records.checkpoints import export_model

    notes = export_model(checkpoint, out)
    typer.echo(f"{out} holds the model of {notes.run_id} after step {notes.step}")
