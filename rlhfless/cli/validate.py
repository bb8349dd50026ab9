"""`rlhfless validate`, `schema` and `devices`: check a spec, print what it may contain, and list the known devices."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless.cli.options import Overrides, SpecFile
from rlhfless.util.text import legible

if TYPE_CHECKING:
    from rlhfless.scaling.latency.devices import DeviceSheet, Figure
    from rlhfless.scaling.prices import PriceBook


def validate(
    spec: SpecFile,
    overrides: Overrides = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", "--defaults", help="Print the whole spec, with defaults and the values that these devices decide."
        ),
    ] = False,
) -> None:
    """Check a spec and its model, data, rewards and devices. Prints what you set, as YAML."""
    from rlhfless.planning.preflight import preflight
    from rlhfless.spec.load import load_spec, resolved_yaml, set_yaml

    own = load_spec(spec, overrides or ())
    prepared = preflight(own)
    loaded, resolved = prepared.spec, prepared.resolved
    joined = f"the devices of the cluster at {own.placement.ray_address}"
    devices = joined if resolved is None else resolved.devices.text
    if prepared.sizes:
        devices += f" (elastic: from {prepared.sizes[0]} to {prepared.sizes[-1]})"
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
        Schema, typer.Argument(help="What to describe: spec, scenario, price book, or table of devices.")
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


def devices(
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own price book (docs/prices.md).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the source of every figure.")] = False,
) -> None:
    """List the kinds of devices that plans and simulations know, with data sheets and prices.

    RLHFLESS_DEVICES names a file with your own devices (docs/prices.md).
    """
    from rlhfless.scaling.latency.devices import load_devices
    from rlhfless.scaling.prices import load_price_book

    sheets, book = load_devices(), load_price_book(None if prices is None else str(prices))
    if as_json:
        typer.echo(json.dumps([_as_json(sheet, book) for sheet in sheets.values()], indent=2))
    else:
        _show(list(sheets.values()), book)


def _as_json(sheet: DeviceSheet, book: PriceBook) -> dict[str, object]:
    price = book.device(sheet.kind).model_dump(mode="json") if sheet.kind in book.kinds else None
    return sheet.model_dump(mode="json", exclude={"price"}) | {"price": price}


def _show(sheets: list[DeviceSheet], book: PriceBook) -> None:

    from rlhfless.cli.tables import table
    from rlhfless.telemetry.terminal import Terminal, decimal

    made = table(
        "kind", "TFLOP/s", "fp8", "fp4", "GB", "TB/s", "link GB/s", "W", "$/h", "as of", "hyper $/h", padding=1
    )
    for sheet in sheets:
        price = book.device(sheet.kind) if sheet.kind in book.kinds else None
        made.add_row(
            sheet.kind + (" *" if sheet.no_engine else ""),
            *(_in(1e12, figure) for figure in (sheet.flops_per_s, sheet.fp8_flops_per_s, sheet.fp4_flops_per_s)),
            _in(1e9, sheet.memory_bytes),
            decimal(sheet.memory_bytes_per_s.value / 1e12, 2),
            _in(1e9, sheet.link_bytes_per_s),
            _in(1, sheet.power_w),
            "-" if price is None else decimal(price.usd_per_hour, 2),
            "-" if price is None else f"{price.as_of:%Y-%m}",
            "-" if sheet.hyperscaler is None else decimal(sheet.hyperscaler.usd_per_hour, 2),
        )
    console = Terminal()
    console.print(made)
    console.print("* can be planned for, and not run on: no engine of rlhfless runs there")
    console.print("$/h is of the price book, hyper $/h a hyperscaler's on demand; - where none was read")
    console.print(
        "dense peaks in 16, 8 and 4 bits; --json has the source of each figure, docs/prices.md how to bring prices"
    )


def _in(unit: float, figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value / unit:,.0f}"
