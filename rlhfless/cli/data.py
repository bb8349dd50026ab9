"""`rlhfless data` and `rlhfless models`: rows as a run reads them, and models that come with rlhfless or from runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhfless.cli.options import Overrides, SpecFile
from rlhfless.util.text import WrittenFloat

if TYPE_CHECKING:
    from rich.text import Text

    from rlhfless.bundled.warm_start import WarmStartProgress
    from rlhfless.prepare.shown_rows import ShownPiece, ShownRow, ShownSequence
    from rlhfless.spec import RunSpec


LEARNED_MARKS = "⟦", "⟧"
"""Around what is learned, where there are no colours."""

_NO_SPANS = {
    "rlhf": "a run of type rlhf learns its own responses, and nothing of the data",
    "reward_model": "a reward model learns the score of a whole sequence, and no part of it",
}
"""Why a run of a type has no spans of its data to learn."""

_STYLES = {
    (False, False): "",
    (False, True): "bold cyan",
    (True, False): "black on green",
    (True, True): "bold black on bright_green",
}
"""By whether the text is learned, and whether it is a special token."""

MOST_CHARACTERS = 2_000
"""Maximum characters of a value of a row or of a reward's input. JSON has all of them."""


data = typer.Typer(help="Show the data of a spec.", no_args_is_help=True)
data.callback()(lambda: None)  # without it, typer would turn a group of one command into that command
models = typer.Typer(help="Build the bundled models, and export models from runs.", no_args_is_help=True)


@data.command()
def show(
    spec: SpecFile,
    row: Annotated[int, typer.Option("--row", metavar="N", min=1, help="Number of the row, from 1.")] = 1,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="NAME",
            help="Only this data set: `train`, `held_out`, or a name of prompts.mixture or evaluation.sets.",
        ),
    ] = None,
    learned: Annotated[bool, typer.Option("--learned", help="Print only the text that the run learns.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
    overrides: Overrides = None,
) -> None:
    """Show a row of each data set: as given, as the policy reads it, what is learned, and what rewards receive.

    Example: rlhfless data show run.yaml --row 3
    """
    from rlhfless.prepare.model import load_policy
    from rlhfless.prepare.shown_rows import shown_rows
    from rlhfless.spec.errors import InputError, Problem
    from rlhfless.spec.load import load_spec

    loaded = load_spec(spec, overrides or ())
    if learned and (why := _NO_SPANS.get(loaded.type)):
        raise InputError("the command line", [Problem("--learned", why, "leave it out to see everything")])
    rows = shown_rows(loaded, load_policy(loaded.model), dataset, row)
    for each in rows:
        if as_json:
            typer.echo(json.dumps(_as_json(each), ensure_ascii=False, default=str))
        elif learned:
            _print_learned(each)
        else:
            _print(loaded, each)
    problems = [Problem(each.where, what) for each in rows for reward in each.rewards for what in reward.problems]
    if problems:
        raise InputError("the rewards cannot score the rows shown", problems)


def _as_json(row: ShownRow) -> dict[str, Any]:
    return {
        "dataset": row.data_set,
        "row": row.number,
        "where": row.where,
        "use": row.use,
        "prompt_id": row.prompt_id,
        "given": row.values,
        "sequences": [
            {
                "name": each.name,
                "text": each.text,
                "learned_text": each.learned_text,
                "tokens": len(each.token_ids),
                "learned_tokens": sum(each.learned),
                "token_ids": each.token_ids,
                "learned": each.learned,
            }
            for each in row.sequences
        ],
        "rewards": [
            {
                "name": each.reward,
                "type": each.kind,
                "weight": each.weight,
                "gets": each.gets,
                "problems": each.problems,
            }
            for each in row.rewards
        ],
        "warnings": row.warnings,
    }


def _print_learned(row: ShownRow) -> None:
    from rlhfless.util.text import legible

    typer.secho(legible(f"{row.data_set} row {row.number} ({row.where}): {row.use}"), err=True, dim=True)
    for each in row.sequences:
        if len(row.sequences) > 1:
            typer.secho(f"{each.name}:", err=True, dim=True)
        typer.echo(legible(each.learned_text))


def _print(spec: RunSpec, row: ShownRow) -> None:
    from rich.console import Console
    from rich.text import Text

    from rlhfless.util.text import legible

    console = Console(highlight=False, soft_wrap=True)
    marks = LEARNED_MARKS if not console.is_terminal or console.no_color else ("", "")
    parts = [
        f"row {row.number:,} of {row.rows:,}",
        row.where,
        row.use,
        *([f"id {row.prompt_id}"] if row.prompt_id else []),
    ]
    console.print(Text.assemble((row.data_set, "bold"), legible("  " + " · ".join(parts))))
    console.print(Text("\nas given", style="bold"))
    for name, value in row.values.items():
        for line in _given(name, value):
            console.print(Text(legible(line)))
    for each in row.sequences:
        console.print(_heading(spec, each, marks))
        console.print(_rendered(each.pieces, marks))
    if row.rewards:
        console.print(Text("\nrewards get the response and", style="bold"))
    for reward in row.rewards:
        console.print(Text(legible(f"{reward.reward} ({reward.kind}, weight {reward.weight:g})"), style="bold dim"))
        for name, value in reward.gets.items():
            console.print(Text(legible(f"  {name}: {_value(value)}")))
        if not reward.gets and not reward.problems:
            console.print(Text("  nothing else"))
        for what in reward.problems:
            console.print(Text(legible(f"  cannot score it: {what}"), style="red"))
    for warning in row.warnings:
        console.print(Text(legible(f"warning: {warning}"), style="yellow"))
    console.print("")


def _given(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of a value: for chat messages, a line per message and per additional key."""
    messages = isinstance(value, list) and value and all(isinstance(each, Mapping) and "role" in each for each in value)
    if not messages:
        yield f"  {name}: {_value(value)}"
        return
    yield f"  {name}:"
    for message in value:
        yield f"    {message['role']}: {_value(message.get('content'))}"
        for key, inner in message.items():
            if key not in ("role", "content") and inner is not None:
                yield f"      {key}: {_value(inner)}"


def _value(value: Any) -> str:
    """Format a value as the data has it, with its type if JSON lacks the type."""
    if isinstance(value, WrittenFloat):
        text = value.text
    elif value is None or isinstance(value, str | int | float | list | tuple | Mapping):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = f"{value} ({type(value).__name__})"
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"


def _heading(spec: RunSpec, sequence: ShownSequence, marks: tuple[str, str]) -> Text:
    from rich.text import Text

    count, learned = len(sequence.token_ids), sum(sequence.learned)
    between = ", between {} and {}".format(*marks) if marks[0] else ""
    if not spec.supervised:
        what = f"{count:,} tokens; the run learns what it generates after them"
    elif spec.type == "reward_model":
        what = f"{count - learned:,} tokens, and one token for the score{between}"
    else:
        what = f"{count:,} tokens, {learned:,} of them learned{between}"
    return Text.assemble((f"\n{sequence.name}", "bold"), f" ({what})")


def _rendered(pieces: tuple[ShownPiece, ...], marks: tuple[str, str]) -> Text:
    """Render a sequence: special tokens in bold, learned text on green or between marks."""
    from rich.text import Text

    from rlhfless.util.text import legible

    made, learned = Text(), False
    for piece in pieces:
        if piece.learned != learned:
            made.append(marks[0] if piece.learned else marks[1])
            learned = piece.learned
        made.append(legible(piece.text), style=_STYLES[piece.learned, piece.special])
    made.append(marks[1] if learned else "")
    return made


@models.command()
def tiny(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")] = Path("tiny"),
    task: Annotated[
        Literal["counting", "safe"],
        typer.Option(help="`counting`: one response per prompt. `safe`: several turns with a tool."),
    ] = "counting",
    seed: Annotated[int, typer.Option(help="Seed of the model and of the data.")] = 0,
    experts: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="Experts in each layer, of which a token passes two. 0: a dense model; 1 is refused."
        ),
    ] = 0,
    untaught: Annotated[
        bool, typer.Option("--untaught", help="Use random weights, in seconds, to check that a run works end to end.")
    ] = False,
) -> None:
    """Build a tiny model with a task of its own: a first run in minutes, without a GPU or a download."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from transformers.utils.logging import disable_progress_bar

    from rlhfless import bundled

    if experts == 1:
        raise typer.BadParameter("a token passes two experts; give 0 or at least 2", param_hint="--experts")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # ours is enough
    with Bar(console=Console(stderr=True), transient=True) as bar:
        doing = f"teaching the model the task `{task}`"
        taught = bar.add_task(doing, total=None)

        def show(progress: WarmStartProgress) -> None:
            description = f"{doing} (loss {progress.loss:.3f})"
            bar.update(taught, total=progress.steps, completed=progress.step, description=description)

        recipe = bundled.Recipe() if task == "counting" else bundled.agent()
        if experts:
            recipe = replace(recipe, size=replace(recipe.size, experts=experts))
        if untaught:
            recipe = replace(recipe, warm_start=bundled.WarmStartRecipe(steps=0))
        paths = bundled.build(out, seed=seed, recipe=recipe, on_progress=show)
    typer.echo(f"{paths.folder} holds model/, {paths.train.name} and {paths.held_out.name}")


@models.command()
def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Folder or URL of the checkpoint, or a run's folder for its newest one."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; it must not exist.")],
    merged: Annotated[bool, typer.Option(help="Merge an adapter (model.lora) with its base model.")] = False,
) -> None:
    """Copy the model and tokenizer of a checkpoint in Hugging Face format, without the optimizer's state.

    A run with model.lora has an adapter in PEFT's format.
    """
    from rlhfless.records.checkpoints import export_model

    notes = export_model(checkpoint, out, complete=_merge if merged else None)
    typer.echo(f"{out} holds the model of {notes.run_id} after step {notes.step}")


def _merge(adapter: Path, out: Path) -> None:
    from rlhfless.functions.lora import merge_adapter  # it imports torch

    merge_adapter(adapter, out)
