"""`rlhfless validate` and `rlhfless schema`: check a spec, and print what a spec may contain."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from rlhfless.cli.options import Overrides, SpecFile
from rlhfless.util.text import legible


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(validate)
    app.command()(schema)


def validate(
    spec: SpecFile,
    overrides: Overrides = None,
    everything: Annotated[
        bool,
        typer.Option("--all", "--defaults", help="Print the whole spec: every default, and what these devices decide."),
    ] = False,
) -> None:
    """Check a spec, its model, data, rewards and devices. Prints what you set, as YAML."""
    from rlhfless.planning.inputs import on_these_devices
    from rlhfless.planning.preflight import preflight
    from rlhfless.spec.load import load_spec, resolved_yaml, set_yaml

    own = load_spec(spec, overrides or ())
    loaded, devices = on_these_devices(own)
    prepared = preflight(loaded)
    typer.echo(resolved_yaml(loaded) if everything else set_yaml(own), nl=False)
    open_passes = (name for name, part in own.trained.items() if part.micro_batch_tokens == "auto")
    decided = [f"{name}.micro_batch_tokens {loaded.trained[name].pass_tokens}" for name in open_passes]
    skipped = sum(len(each.rows) for each in prepared.skipped)
    for warning in prepared.warnings:
        typer.secho(legible(f"warning: {warning}"), err=True, fg="yellow")
    typer.secho(
        f"ok: {len(prepared.train)} training and {len(prepared.held_out)} held-out prompts"
        f"{f' ({skipped} rows skipped)' if skipped else ''}, "
        f"sequences of up to {prepared.max_model_len} tokens, on {devices}{''.join(f', {each}' for each in decided)}",
        err=True,
        fg="green",
    )


class Schema(StrEnum):
    """Files that have a schema."""

    SPEC = "spec"
    SCENARIO = "scenario"
    PRICES = "prices"
    DEVICES = "devices"


def schema(
    of: Annotated[
        Schema, typer.Argument(help="A spec, a scenario, a price book, or a table of devices.")
    ] = Schema.SPEC,
) -> None:
    """Print the JSON schema of a spec, a scenario, a price book, or a table of devices, for editors and other tools."""
    from rlhfless.scaling.latency.devices import DeviceTable
    from rlhfless.scaling.prices import PriceBook
    from rlhfless.sim.scenarios import Scenario
    from rlhfless.spec import RunSpec
    from rlhfless.spec.base import SpecModel
    from rlhfless.spec.load import json_schema

    models: dict[Schema, type[SpecModel]] = {
        Schema.SPEC: RunSpec,
        Schema.SCENARIO: Scenario,
        Schema.PRICES: PriceBook,
        Schema.DEVICES: DeviceTable,
    }
    typer.echo(json.dumps(json_schema(models[of]), indent=2))
