"""`rlhfless environments`: episodes of an environment, before a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfless.util.text import legible

if TYPE_CHECKING:
    from rlhfless.environments.contract import EnvironmentSource
    from rlhfless.environments.trajectory import Trajectory
    from rlhfless.prepare.environment_trial import EnvironmentTrial
    from rlhfless.spec import EnvironmentSpec

_SHOWN = 1
"""Transcripts that are printed besides those of failed episodes; JSON has all."""
_MOST_CHARACTERS = 2_000
"""Most characters of one turn that are printed."""


environments = typer.Typer(help="Try out environments: tools and games of several turns.", no_args_is_help=True)
environments.callback()(lambda: None)  # without it, typer would turn a group of one command into that command


@environments.command("test")
def try_out(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ENVIRONMENT",
            help="`my_env.py`, `my_env.py:Class`, `module:Class`, or `run.yaml`: the environment of a run's spec.",
        ),
    ],
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="JSONL or Parquet with one row per task.")
    ] = None,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Episodes to play.")] = 10,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="`random`: random calls of the right types; `scripted:FILE`: a JSON list of turns per line; `model`.",
        ),
    ] = "random",
    model: Annotated[
        str, typer.Option("--model", metavar="PATH", help="Use the tokenizer and chat template of this model.")
    ] = "",
    turns: Annotated[int | None, typer.Option("--turns", min=1, help="Turns of an episode (default: 16).")] = None,
    call_s: Annotated[
        float | None, typer.Option("--call-s", min=0.01, help="Seconds of one call (default: 30).")
    ] = None,
    memory_mib: Annotated[
        int | None, typer.Option("--memory-mib", min=64, help="Memory of one session (default: 1024).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of episodes and policy.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play episodes of an environment without GPUs; print a transcript, timings and every fault.

    Exits with 1 if a fault was found. Example: rlhfless environments test my_env.py --rows prompts.jsonl
    """
    from rlhfless.environments.trajectory import EpisodeLimits
    from rlhfless.prepare.environment_trial import TrialSettings, try_environment

    source, spec = _source(target)
    given = {"turns": turns, "call_s": call_s, "memory_mib": memory_mib, "retries": 0}
    spec = spec.model_copy(update={name: value for name, value in given.items() if value is not None})
    limits = EpisodeLimits.of(spec, EpisodeLimits().context_tokens)
    trial = try_environment(TrialSettings(source, rows, episodes, policy, model, seed, spec.memory_mib, limits))
    if as_json:
        typer.echo(json.dumps(_as_json(trial), indent=2, ensure_ascii=False))
    else:
        _show(trial)
    if trial.faults:
        raise typer.Exit(1)


def _source(target: str) -> tuple[EnvironmentSource, EnvironmentSpec]:
    """Return the environment that a target or a run's spec names, and its limits. Raises InputError."""
    from rlhfless.environments.contract import EnvironmentSource
    from rlhfless.spec import EnvironmentSpec
    from rlhfless.spec.errors import InputError, Problem
    from rlhfless.spec.load import load_spec

    if not target.endswith((".yaml", ".yml")):
        return EnvironmentSource(target), EnvironmentSpec(type="module:Class")
    spec = load_spec(target).environment
    if spec is None:
        hint = "name the environment itself, or a spec that has one"
        raise InputError(f"spec {target!r}", [Problem("environment", "is missing", hint)])
    return EnvironmentSource.of(spec), spec


def _show(trial: EnvironmentTrial) -> None:
    from rich import box
    from rich.table import Table

    from rlhfless.telemetry.terminal import Prose, Terminal, whole

    console = Terminal()
    for tool in trial.tools:
        console.print(whole(json.dumps(tool["function"], ensure_ascii=False)))
    shown = 0
    for number, (episode, spoken) in enumerate(zip(trial.episodes, trial.transcripts, strict=True), start=1):
        if shown < _SHOWN or (episode.cause and shown < 2 * _SHOWN):
            shown += 1
            console.print(f"\nEpisode {number}:")
            for who, text in spoken:
                cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
                console.print(whole(f"[{who}]", "bold"), whole(legible(cut)))
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("episode", "status", "reward", "turns", "calls", "invalid", "tokens", "environment s", "slowest s"):
        table.add_column(heading, justify="left" if heading == "status" else "right", no_wrap=True)
    for number, episode in enumerate(trial.episodes, start=1):
        row = _figures(episode)
        waits = (f"{row['wait_s']:.3f}", f"{row['slowest_call_s']:.3f}")
        reward = "-" if row["reward"] is None else f"{row['reward']:.4g}"
        figures = (str(row[key]) for key in ("turns", "calls", "invalid_calls", "tokens"))
        table.add_row(str(number), row["status"], reward, *figures, *waits)
    console.print(table)
    for note in trial.notes:
        console.print(Prose(f"note: {note}"))
    for fault, count in trial.faults.items():
        console.print(Prose(f"fault ({count}x): {fault}", style="red"))
    console.print(f"episodes: {len(trial.episodes)}, different faults: {len(trial.faults)} ({trial.wall_s:.1f} s)")


def _figures(episode: Trajectory) -> dict[str, Any]:
    """Return the figures of an episode."""
    invalid = sum(call.answer.outcome.value == "invalid" for call in episode.calls)
    return {
        "status": str(episode.status),
        "reward": episode.reward,
        "parts": dict(episode.parts),
        "conversations": len({turn.conversation for turn in episode.turns}),
        "turns": len(episode.turns),
        "calls": len(episode.calls),
        "invalid_calls": invalid + sum(turn.parsed.value in ("invalid", "unfinished") for turn in episode.turns),
        "tokens": len(episode.token_ids),
        "generated_tokens": sum(episode.generated_mask),
        "wait_s": episode.wait_s,
        "slowest_call_s": max((call.wait_s for call in episode.calls), default=0.0),
        "cause": episode.cause,
    }


def _as_json(trial: EnvironmentTrial) -> Mapping[str, Any]:
    episodes = [
        {
            "row": episode.key[0],
            **_figures(episode),
            "transcript": [{"from": who, "text": text} for who, text in spoken],
            "calls": [
                {
                    "number": call.number,
                    "tool": call.tool,
                    "arguments": call.arguments,
                    "outcome": str(call.answer.outcome),
                    "answer": call.answer.text,
                    "reward": call.answer.reward,
                    "wait_s": call.wait_s,
                }
                for call in episode.calls
            ],
        }
        for episode, spoken in zip(trial.episodes, trial.transcripts, strict=True)
    ]
    return {
        "environment": trial.description.name,
        "digest": trial.description.digest,
        "tools": [tool["function"] for tool in trial.tools],
        "episodes": episodes,
        "faults": dict(trial.faults),
        "notes": trial.notes,
        "wall_s": trial.wall_s,
    }
