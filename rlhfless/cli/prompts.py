"""`rlhfless prompts`: files of prompts for runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

prompts = typer.Typer(help="Make files of prompts.", no_args_is_help=True)
prompts.callback()(lambda: None)  # without it, typer would turn a group of one command into that command


@prompts.command("reasoning-gym")
def reasoning_gym(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of a task, such as `countdown`.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where train.jsonl and heldout.jsonl go.")],
    rows: Annotated[int, typer.Option("--rows", min=1, max=1_000_000, help="Rows to train on.")] = 1000,
    held_out: Annotated[int, typer.Option("--held-out", min=0, max=100_000, help="Held-out rows.")] = 100,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the task's generator.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of the task, such as `max_value=50`."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Do not ask for the answer in <answer> tags.")] = False,
) -> None:
    """Make prompts of a task of reasoning-gym, and print the part of a spec that reads and scores them.

    Example: rlhfless prompts reasoning-gym countdown --out countdown --set max_numbers=4
    """
    import yaml

    from rlhfless.prepare.reasoning_gym import INSTRUCTION, write_task
    from rlhfless.spec.errors import InputError, Problem

    values = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError("the command line", [Problem("--set", f"got {setting!r}", "write KEY=VALUE")])
        values[key] = yaml.safe_load(value)
    instruction = "" if plain else INSTRUCTION
    files = write_task(task, out, rows=rows, held_out=held_out, seed=seed, settings=values, instruction=instruction)
    typer.echo(f"# {files.train}: {files.train_rows} rows" + f", held out: {files.held_out_rows}" * bool(held_out))
    section: dict[str, object] = {"path": str(files.train), "id_field": "id"}
    if files.held_out is not None:
        section["held_out"] = {"path": str(files.held_out)}
    reward = {"type": "python", "name": "score", "target": "rlhfless.rewards.reasoning_gym:score"}
    typer.echo(yaml.safe_dump({"prompts": section, "rewards": [reward]}, sort_keys=False).rstrip())
