"""The table of `rlhfless trace lengths`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.scaling.lengths import QUANTILE_LEVELS
from rlhfless.scaling.lengths.evaluate import ForecastScore
from rlhfless.telemetry.numbers import count, decimal

SHOWN_LEVELS = (0.1, 0.5, 0.9, 0.99)
"""Quantiles whose coverage is shown."""


def lengths_report(run_id: str, scores: Sequence[ForecastScore]) -> RenderableType:
    """One row per forecaster."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("response lengths", no_wrap=True)
    for heading in ("samples", "rank corr", "pinball", *(f"p{100 * level:g}" for level in SHOWN_LEVELS)):
        table.add_column(heading, justify="right", no_wrap=True)
    at = [QUANTILE_LEVELS.tolist().index(level) for level in SHOWN_LEVELS]
    for score in scores:
        covered = [None] * len(at) if score.coverage is None else score.coverage[at].tolist()
        shares = [decimal(share) for share in covered]
        row = (count(score.samples), decimal(score.rank_correlation), decimal(score.pinball_tokens, 1))
        table.add_row(score.name, *row, *shares)
    legend = (
        "rank corr: Spearman within a step. pinball: mean loss over all quantiles, in tokens; lower is better. "
        "p90: share of lengths at or below the 90 % quantile; 0.9 is right. Half time: the rest of a step, "
        "when half of its samples have finished."
    )
    return Group(Text(run_id, style="bold"), "", table, "", Text(legend, style="dim"))
