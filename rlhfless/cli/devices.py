"""`rlhfless devices`: what is known of kinds of devices, and what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlhfless.scaling.latency.devices import DeviceSheet, Figure
    from rlhfless.scaling.prices import PriceBook


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(devices)


def devices(
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A price book of your own (docs/prices.md).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the source of every figure.")] = False,
) -> None:
    """The kinds of devices that plans and simulations know, with their data sheets and prices.

    RLHFLESS_DEVICES names a file with devices of your own (docs/prices.md).
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
    from rlhfless.telemetry.numbers import decimal
    from rlhfless.telemetry.terminal import Terminal

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
