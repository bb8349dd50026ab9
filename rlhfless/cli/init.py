"""`rlhfless init`: write the commented spec of a recipe into the current folder."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

RECIPES = Path(str(files("rlhfless"))) / "recipes"

_NOTE = re.compile(r"^# (\w+): (.+)\n", re.MULTILINE)
"""What a recipe says to programs: `files` that belong to it, `devices` and options with which it can be planned."""


def recipes() -> dict[str, str]:
    """Return the text of each recipe, by name."""
    return {path.stem: path.read_text() for path in sorted(RECIPES.glob("*.yaml"))}


def notes_of(recipe: str) -> dict[str, str]:
    """Return what a recipe says to programs, by word."""
    return dict(_NOTE.findall(recipe))


def summary_of(recipe: str) -> str:
    """Return the first comment of a recipe."""
    return recipe.partition("\n")[0].removeprefix("# ")


def init(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Name of a recipe. Default: list the recipes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where the spec goes. Default: RECIPE.yaml.")
    ] = None,
) -> None:
    """Write the commented spec of a recipe, and the files that belong to it. Nothing is overwritten.

    Example: rlhfless init gsm8k-qwen3-0.6b --out run.yaml
    """
    from rlhfless.spec.errors import InputError, Problem
    from rlhfless.spec.explain import nearest

    known = recipes()
    if recipe is None:
        width = max(map(len, known))
        for name, text in known.items():
            typer.echo(f"{name:<{width}}  {summary_of(text)}")
        typer.echo("\nWrite one with: rlhfless init RECIPE")
        return
    if recipe not in known:
        hint = f"{nearest(recipe, known)}Recipes: {', '.join(known)}"
        raise InputError("the command line", [Problem("RECIPE", f"{recipe!r} is not a recipe", hint)])
    text, target = known[recipe], out or Path(f"{recipe}.yaml")
    notes = notes_of(text)
    written = {target: _NOTE.sub("", text).replace(f"{recipe}.yaml", str(target))}
    written |= {target.parent / name: (RECIPES / name).read_text() for name in notes.get("files", "").split()}
    if there := [path for path in written if path.exists()]:
        hint = "move it away, or name another file with --out"
        raise InputError("the command line", [Problem("--out", f"{there[0]} is there already", hint)])
    for path, content in written.items():
        path.write_text(content)
        typer.echo(f"wrote {path}")
    options = notes.get("plan", "")
    typer.echo(f"next: rlhfless plan {target} --devices {notes['devices']} {options}".rstrip())
