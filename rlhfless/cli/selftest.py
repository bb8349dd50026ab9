"""`rlhfless selftest`: checks the parts of a run on this machine, or on each node of a cluster, and measures them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfless.cli.options import OptionalSpecFile, Overrides

if TYPE_CHECKING:
    from rich.console import Console

    from rlhfless.selftest.check import CheckOutcome
    from rlhfless.spec import RunSpec

FAILED = 1
"""Exit code if a check has failed."""

NODE_S = 1800.0
"""Longest wait for the nodes of a cluster: with cold caches a self-test of eight GPUs takes up to nine minutes with the
bundled model (computed), and each of its four engines of a large model minutes more."""

COLOURS = {"ok": "green", "failed": "red", "not applicable": "dim"}


def selftest(
    spec: OptionalSpecFile = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write the report to, as JSON, for an issue or a plan."),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", metavar="HOST:PORT", help="Ray cluster whose nodes are all tested.")
    ] = None,
) -> None:
    """Check drivers, memory, engine, learner and weights within minutes, with a bundled model or that of SPEC.

    Ends with the step time predicted from the measurements; `rlhfless plan --measured` uses them.
    """
    from transformers.utils.logging import disable_progress_bar

    from rlhfless.selftest.between_nodes import between_nodes
    from rlhfless.selftest.report import node_report, whole_report
    from rlhfless.spec.load import load_spec
    from rlhfless.telemetry.terminal import Terminal

    disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = None if spec is None else load_spec(spec, overrides or ())
    console = Terminal(soft_wrap=True)
    if ray_address is None:
        node = node_report(loaded, lambda outcome: _show(console, outcome))
        nodes, between = {"this machine": node}, between_nodes(None)
        _show(console, between)
        _show_step(console, node["step"])
    else:
        nodes, between = asyncio.run(_on_cluster(console, ray_address, loaded))
        _show_nodes(console, nodes)
    report = whole_report(nodes, between)
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        console.print(f"{out} has the report")
    states = [check["state"] for node in nodes.values() for check in node["checks"]]
    if "failed" in (*states, between.state):
        raise typer.Exit(FAILED)


async def _on_cluster(
    console: Console, address: str, spec: RunSpec | None
) -> tuple[dict[str, dict[str, Any]], CheckOutcome]:
    from rlhfless.fleet.cluster import Cluster
    from rlhfless.fleet.each_node import ask_each_node
    from rlhfless.selftest.between_nodes import MEET_S, between_nodes
    from rlhfless.selftest.report import node_report, node_without_report
    from rlhfless.spec import PlacementSpec

    placement = PlacementSpec() if spec is None else spec.placement
    cluster = await Cluster.start(placement.model_copy(update={"ray_address": address}), Path())
    try:
        console.print(f"the network between the nodes of {address}, in at most {12 * MEET_S:.0f} s")
        on_nodes = partial(ask_each_node, timeout_s=4 * MEET_S, with_cores=True)
        between = await asyncio.to_thread(between_nodes, on_nodes)
        _show(console, between)
        console.print(f"all nodes at once: shown when the last one has ended, in minutes; at most {NODE_S:.0f} s")
        reports, faults = await asyncio.to_thread(
            partial(ask_each_node, node_report, spec, timeout_s=NODE_S, with_cores=True)
        )
    finally:
        await cluster.stop()
    found: dict[str, Any] = {**reports, **{node: node_without_report(fault) for node, fault in faults.items()}}
    return dict(sorted(found.items())), between


def _show_nodes(console: Console, nodes: Mapping[str, Mapping[str, Any]]) -> None:
    from rlhfless.selftest.check import CheckOutcome

    for name, node in nodes.items():
        devices = node["devices"]
        console.print(f"node {name}: {devices['count']} x {devices['kind']}" if devices else f"node {name}")
        for check in node["checks"]:
            _show(console, CheckOutcome(**check))
        if devices:
            _show_step(console, node["step"])


def _show(console: Console, outcome: CheckOutcome) -> None:
    from rich.markup import escape

    figures = ", ".join(f"{name} {_figure(value)}" for name, value in outcome.measured.items() if name != "trace")
    state = f"[{COLOURS[outcome.state]}]{outcome.state}[/]"
    console.print(f"{outcome.name:20} {state:8} {outcome.seconds:6.1f} s  {escape(outcome.why or figures)}")
    if outcome.state == "failed":
        console.print(escape("\n".join(filter(None, (figures, outcome.measured.get("trace"))))), style="dim")
        console.print(f"remedy: {escape(outcome.remedy)}")


def _figure(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_figure(each)}" for name, each in value.items()) + "}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _show_step(console: Console, step: Mapping[str, Any] | None) -> None:
    if step is None:
        console.print("step time: not predicted, because not all that it needs was measured")
    elif step["predicted"] is None:
        console.print(f"step time: {step['reason']}")
    else:
        predicted = step["predicted"]
        low, high = (predicted[name] / predicted["steps"] for name in ("wall_low_s", "wall_high_s"))
        console.print(f"step time: {predicted['step_s']:.3g} s ({low:.3g} to {high:.3g}); lengths {step['lengths']}")
    if step is not None and (measured := step["measured"]) is not None:
        _show_measured(console, measured)


def _show_measured(console: Console, measured: Mapping[str, Any]) -> None:
    """Print the measured step and its prediction."""
    parts = ", ".join(f"{name} {measured[f'{name}_s']:.3g}" for name in ("publish", "load", "generation", "learn"))
    predicted_s = measured["predicted_s"]
    beside = f"not predicted ({measured['reason']})" if predicted_s is None else f"predicted {predicted_s:.3g} s"
    console.print(f"measured step of {measured['samples']} samples: {measured['step_s']:.3g} s, {beside}; {parts} s")
