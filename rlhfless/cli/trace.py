"""`rlhfless trace`: bill, times, samples and length forecasts of a recorded run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfless.cli.options import TraceFolder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlhfless.records.traces import Trace, TracedPrompt, TracedRollout
    from rlhfless.scaling.lengths.quality import ForecastScore


SHOWN_LEVELS = (0.1, 0.5, 0.9, 0.99)
"""Quantiles whose coverage `rlhfless trace lengths` shows."""


trace = typer.Typer(help="Show the trace of a run.", no_args_is_help=True)


@trace.command()
def summary(folder: TraceFolder) -> None:
    """Print a run's cost, where its steps spent their time, and its response lengths."""

    from rlhfless.cli.tables import trace_report
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.scaling.accounting import summarise
    from rlhfless.scaling.episode_waits import episode_waits
    from rlhfless.scaling.prices import PriceBook
    from rlhfless.telemetry.terminal import Terminal

    recorded = read_trace(trace_folder(folder))
    prices = PriceBook.model_validate(recorded.meta.prices)
    bill = summarise(recorded, prices)
    Terminal().print(trace_report(recorded.meta.run_id, bill, episode_waits(recorded, prices)))


@trace.command()
def compare(first: TraceFolder, second: TraceFolder) -> None:
    """Print the share of samples with the same tokens in two runs, such as a resumed and an uninterrupted one."""
    from rlhfless.records.traces import compare_samples, read_trace, trace_folder

    result = compare_samples(read_trace(trace_folder(first)), read_trace(trace_folder(second)))
    typer.echo(f"{result.identical:,} of {result.compared:,} samples are token-identical ({result.fraction:.4f})")
    if result.first_difference is not None:
        step, prompt_id, index = result.first_difference
        typer.echo(f"the first that differs: step {step}, prompt {prompt_id}, sample {index}")
    if result.only_in_first or result.only_in_second:
        typer.echo(f"only in the first: {result.only_in_first:,}; only in the second: {result.only_in_second:,}")


@trace.command()
def lengths(folder: TraceFolder) -> None:
    """Print how well response lengths could be forecast from earlier steps, compared with two simple forecasts."""

    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.scaling.lengths.quality import score_forecasts
    from rlhfless.telemetry.terminal import Terminal

    recorded = read_trace(trace_folder(folder))
    Terminal().print(_lengths_report(recorded.meta.run_id, score_forecasts(recorded)))


def _lengths_report(run_id: str, scores: Sequence[ForecastScore]) -> RenderableType:
    """Render a row per forecaster."""
    from rich.console import Group
    from rich.text import Text

    from rlhfless.cli.tables import table
    from rlhfless.scaling.lengths import QUANTILE_LEVELS
    from rlhfless.telemetry.terminal import count, decimal

    levels = [f"p{100 * level:g}" for level in SHOWN_LEVELS]
    made = table("response lengths", "samples", "rank corr", "pinball", *levels)
    at = [QUANTILE_LEVELS.tolist().index(level) for level in SHOWN_LEVELS]
    for score in scores:
        covered = [None] * len(at) if score.coverage is None else score.coverage[at].tolist()
        shares = [decimal(share) for share in covered]
        row = (count(score.samples), decimal(score.rank_correlation), decimal(score.pinball_tokens, 1))
        made.add_row(score.name, *row, *shares)
    legend = (
        "rank corr: Spearman within a step. pinball: mean loss over all quantiles, in tokens; lower is better. "
        "p90: share of lengths at or below the 90 % quantile; 0.9 is right. Half time: the rest of a step, "
        "when half of its samples have finished."
    )
    return Group(Text(run_id, style="bold"), "", made, "", Text(legend, style="dim"))


SHOWN = 10
"""Samples that are printed by default."""


@dataclass(frozen=True, slots=True)
class SamplesWanted:
    """Which samples are printed. None: all."""

    step: int | None = None
    prompt: str | None = None
    """A prompt id, or the beginning of one."""
    search: str | None = None
    """A text in the prompt or the response, in any case."""
    failed: bool = False
    """Only samples with a failed reward."""


@trace.command()
def samples(
    folder: TraceFolder,
    step: Annotated[int | None, typer.Option("--step", help="Only samples of this step.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="ID", help="Only samples of this prompt, over all steps.")
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", metavar="TEXT", help="Only samples with this text in prompt or response.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only samples with a failed reward.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Print at most this many samples.")] = SHOWN,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per sample.")] = False,
) -> None:
    """Print prompts and responses with their rewards. Needs a run with `logging.record_tokens`."""
    from rlhfless.records.schema import TraceError
    from rlhfless.records.traces import read_trace, trace_folder

    where = trace_folder(folder)
    recorded = read_trace(where)
    if recorded.rollouts and all(rollout.text is None for rollout in recorded.rollouts):
        raise TraceError(f"{where} has no text of responses; record it with logging.record_tokens: true")
    found = list(selected(recorded, SamplesWanted(step, prompt, search, failed)))
    prompts = {each.prompt_id: each for each in recorded.prompts}
    shown = [as_object(rollout, prompts.get(rollout.prompt_id)) for rollout in found[:limit]]
    if as_json:
        for sample in shown:
            typer.echo(json.dumps(sample, ensure_ascii=False))
    else:
        print_samples(shown)
        typer.echo(f"{min(limit, len(found)):,} of {len(found):,} samples", err=True)


def selected(trace: Trace, wanted: SamplesWanted) -> Iterator[TracedRollout]:
    """Yield the wanted samples of a trace, by step, prompt and sample index."""
    prompts = {each.prompt_id: each.text for each in trace.prompts}
    for rollout in sorted(trace.rollouts, key=lambda one: (one.step, one.prompt_id, one.sample_index)):
        texts = (prompts.get(rollout.prompt_id, ""), rollout.text or "")
        if wanted.step not in (None, rollout.step):
            continue
        if wanted.prompt is not None and not rollout.prompt_id.startswith(wanted.prompt):
            continue
        if wanted.failed and not rollout.reward_failures:
            continue
        if wanted.search is not None and not any(wanted.search.casefold() in text.casefold() for text in texts):
            continue
        yield rollout


def as_object(rollout: TracedRollout, prompt: TracedPrompt | None) -> dict[str, Any]:
    """Return a sample as JSON values."""
    from rlhfless.records.episodes import Episode

    episode = None if rollout.episode is None else Episode.of_json(rollout.episode)
    return {
        "step": rollout.step,
        "prompt_id": rollout.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": None if prompt is None else prompt.text,
        "columns": None if prompt is None else prompt.columns,
        "response": rollout.text,
        "finish_reason": str(rollout.finish_reason),
        "response_tokens": rollout.response_tokens,
        "reward": rollout.reward,
        "rewards": dict(rollout.reward_parts),
        "failures": dict(rollout.reward_failures),
        "turns": [] if episode is None else episode.shown(),
        "episode_status": rollout.episode_status,
    }


def print_samples(samples: Sequence[Mapping[str, Any]]) -> None:
    """Print samples, objects as of `as_object`, for people; each prompt once for its samples of a step."""
    from rlhfless.telemetry.terminal import decimal
    from rlhfless.util.text import legible

    before = None
    for sample in samples:
        if (where := (sample["step"], sample.get("split", "train"), sample["prompt_id"])) != before:
            before = where
            held_out = ", held out" if where[1] == "held_out" else ""
            typer.secho(legible(f"step {where[0]}{held_out}, prompt {where[2]}"), bold=True)
            typer.echo(legible("(the prompt was not recorded)" if sample["prompt"] is None else sample["prompt"]))
            for name, value in sample.get("expected", {}).items():
                typer.echo(legible(f"{name} expects: {value}"))
            typer.echo("")
        parts = [f"{name} {decimal(value)}" for name, value in sample["rewards"].items()]
        drawn = "greedy" if sample.get("greedy") else f"sample {sample['sample_index']}"
        turns = sample.get("turns", ())
        end = "cut off" if sample["finish_reason"] == "length" else sample["finish_reason"]
        end = f"{len(turns)} turns, ended by: {sample['episode_status']}" if turns else end
        head = f"{drawn}: reward {decimal(sample['reward'])} ({', '.join(parts) or 'no part'})"
        typer.secho(legible(f"{head}, {sample['response_tokens']} tokens, {end}"), dim=True)
        for name, cause in sample["failures"].items():
            typer.secho(legible(f"{name} failed: {cause}"), fg="red")
        for number, turn in enumerate(turns, start=1):
            reward = "" if turn["reward"] is None else f", reward {decimal(turn['reward'])}"
            typer.secho(f"turn {number}{reward}", dim=True)
            typer.echo(legible(turn["text"]))
            for call in turn["calls"]:
                outcome = "" if call["outcome"] == "result" else f", {call['outcome']}"
                named = (
                    f"{call['tool']}({json.dumps(call['arguments'], ensure_ascii=False)})" if call["tool"] else "answer"
                )
                typer.secho(legible(f"{named}{outcome}, {call['wait_s']:.2f} s"), dim=True)
                typer.echo(legible(call["answer"]))
        if not turns:
            typer.echo(legible(sample["response"] or ""))
        typer.echo("")
