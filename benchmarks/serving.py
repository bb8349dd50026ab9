"""Published serving runs of three engines, against their kernel tables and the devices' data sheets; and their cost.

    python benchmarks/serving.py [--fit] [--rows N] [--smoke]

The runs are those of aiconfigurator-core's `silicon_sample.csv` (InferenceX): so many requests in flight, so many
tokens in and out, and the seconds per token that were measured. Counted are runs on one node whose format is named,
once each. What a model says of one is `steady_token_s`. A fit of an engine on a kind of device is judged on the models
that it was not fitted to. `--fit` prints what `rlhfless/scaling/latency/engines.yaml` has of it. `serving.yaml` has the
models' sizes, and cost points as they were published: the most tokens per second and device at no less than so many per
second and user.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from smoke import parsed
from where import machine

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.engines import ANY_KIND, Basis, EngineName, kernels_or_sheet, served, steady_token_s
from rlhfless.scaling.latency.kernel_tables import FOLDERS, SYSTEMS, NoTables, tables_folder
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape

NODE_DEVICES = 8

SCALES, FIXED_S = np.arange(0.5, 1.705, 0.01), np.arange(0.0, 0.00605, 0.0001)
"""Values of a fit that are tried."""

MOST_IN_FLIGHT = 256
"""Requests of the largest of the published runs of these points."""

FEWEST_ROWS = 30
"""A kind of device with fewer runs of an engine has no fit of its own."""

ENGINES: Mapping[str, EngineName] = {folder: name for name, folder in FOLDERS.items()}  # type: ignore[misc]
KINDS = {system: kind for kind, system in SYSTEMS.items()}
KNOWN = yaml.safe_load(Path(__file__).with_name("serving.yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Setup:
    """An engine on its devices."""

    engine: EngineName
    kind: str
    model: str
    precision: str
    tensor_parallel: int
    data_parallel: int

    @property
    def devices(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def shape(self) -> ModelShape:
        """Raises UnknownShape."""
        known = KNOWN["models"][self.model]
        named = "mxfp4" if "mxfp4" in known.get("formats", ()) else self.precision
        shape = ModelShape.of_config(known["config"] | KNOWN["formats"][named])
        # Engines multiply weights of 4 bits with activations of 8 on devices with such products.
        fast = named == "mxfp4" and device_of(self.kind).fp4_flops_per_s is not None
        return replace(shape, product_bits=8) if fast else shape


@dataclass(frozen=True)
class Run:
    """A published run."""

    setup: Setup
    in_flight: int
    input_tokens: int
    output_tokens: int
    token_s: float
    first_s: float

    def tokens_per_s(self, token_s: float) -> float:
        """Of one device, in and out, if a token takes so long."""
        whole_s = self.first_s + self.output_tokens * token_s
        return self.in_flight * (self.input_tokens + self.output_tokens) / whole_s / self.setup.devices


@dataclass(frozen=True)
class Judged:
    """A run and what a model says of it."""

    run: Run
    by: Basis
    token_s: float

    def error(self, scale: float = 1.0, fixed_s: float = 0.0) -> float:
        return (scale * self.token_s + fixed_s) / self.run.token_s - 1


def published(path: Path) -> tuple[list[Run], int]:
    """The runs that count, once each, and the number of all runs on one node."""
    runs: dict[Run, None] = {}
    others = set()
    for row in csv.DictReader(path.open(encoding="utf-8")):
        ranks = int(row["attention_dp_size"] or 1) or 1
        if row["mode"] != "agg" or row["pp_size"] not in ("", "1") or row["system"] not in KINDS:
            continue
        tensor = 1 if ranks > 1 else int(row["tp_size"])  # with ranks of attention it names the group of the experts
        if ranks * tensor > NODE_DEVICES:
            continue
        key = (row["backend"], KINDS[row["system"]], row["model_path"], row["precision"], tensor, ranks)
        sizes = tuple(int(row[name]) for name in ("batch_size", "isl", "osl"))
        if not row["precision"] or row["model_path"] not in KNOWN["models"]:
            others.add((key, sizes, row["silicon_tpot_ms"]))
            continue
        setup = Setup(ENGINES[row["backend"]], *key[1:])
        seconds = (float(row[name]) / 1000 for name in ("silicon_tpot_ms", "silicon_ttft_ms"))
        runs[Run(setup, sizes[0] * ranks, *sizes[1:], *seconds)] = None
    return list(runs), len(runs) + len(others)


@cache
def model_of(setup: Setup, by: Basis) -> EngineModel | None:
    """None where the engine's kernels have no tables."""
    sheet = device_of(setup.kind)
    if by == "roofline":
        return Roofline(setup.shape, sheet, setup.tensor_parallel, setup.data_parallel)
    devices = setup.tensor_parallel, setup.data_parallel
    model, found = kernels_or_sheet(setup.engine, setup.shape, sheet, *devices)
    return model if found == by else None


def judged(runs: Iterable[Run], by: Basis) -> Iterator[Judged]:
    for run in runs:
        if (model := model_of(run.setup, by)) is not None:
            yield Judged(run, by, steady_token_s(model, run.in_flight, run.input_tokens, run.output_tokens))


def fitted(rows: Sequence[Judged]) -> tuple[float, float]:
    """Scale and constant with the least mean of the logarithms' absolute errors."""
    modelled, real = (
        np.array(values) for values in zip(*((row.token_s, row.run.token_s) for row in rows), strict=True)
    )
    tries = SCALES[:, None, None] * modelled + FIXED_S[None, :, None]
    losses = np.abs(np.log(tries / real)).mean(axis=-1)
    scale, fixed = np.unravel_index(int(losses.argmin()), losses.shape)
    return float(SCALES[scale]), float(FIXED_S[fixed])


def held_out(rows: Sequence[Judged], group: Callable[[Judged], Any]) -> list[float]:
    """Absolute errors of rows, fitted to the groups that each is not in."""
    errors = []
    for name in {group(row) for row in rows}:
        rest = [row for row in rows if group(row) != name]
        if rest:
            fit = fitted(rest)
            errors += [abs(row.error(*fit)) for row in rows if group(row) == name]
    return errors


def by_setup(rows: Iterable[Judged]) -> dict[tuple[EngineName, str], list[Judged]]:
    """By engine, and kind of device, and all kinds together."""
    found = defaultdict(list)
    for row in rows:
        for kind in (row.run.setup.kind, ANY_KIND):
            found[row.run.setup.engine, kind].append(row)
    return {key: found[key] for key in sorted(found) if key[1] == ANY_KIND or len(found[key]) >= FEWEST_ROWS}


def model_name(row: Judged) -> str:
    """DeepSeek's R1 and V3 have the same sizes."""
    return str(KNOWN["models"][row.run.setup.model].get("as", row.run.setup.model))


def fits_table(rows: Sequence[Judged]) -> Iterator[str]:
    yield "| engine | devices | runs | as it is | scale | constant | fitted | other models |"
    yield "|---|---|---|---|---|---|---|---|"
    for (engine, kind), some in by_setup(rows).items():
        fit = fitted(some)
        plain, inside = (median(abs(row.error(*how)) for row in some) for how in ((1.0, 0.0), fit))
        others = held_out(some, model_name)
        outside = f"{median(others):.1%}" if others else "-"
        figures = f"{plain:.1%} | {fit[0]:.2f} | {1000 * fit[1]:.1f} ms | {inside:.1%} | {outside}"
        yield f"| {engine} | {kind} | {len(some)} | {figures} |"


def fits_yaml(rows: Sequence[Judged], by: Basis) -> Iterator[str]:
    for (engine, kind), some in by_setup(rows).items():
        scale, fixed_s = fitted(some)
        error = median(abs(row.error(scale, fixed_s)) for row in some)
        figures = f"scale: {scale:.2f}, fixed_s: {fixed_s:.4f}, rows: {len(some)}, error: {error:.3f}"
        yield f"{engine}: {{kind: {kind}, by: {by}, {figures}}}"


def order(runs: Sequence[Run]) -> Iterator[str]:
    """Pairs that differ in the kind of device, or in the engine alone: is the faster one told?"""
    rates = {
        run: steady_token_s(served_of(run.setup), run.in_flight, run.input_tokens, run.output_tokens) for run in runs
    }
    for name in ("kind", "engine"):
        groups = defaultdict(list)
        for run in runs:
            same: dict[str, Any] = {name: "vllm"}
            like = replace(run.setup, **same)
            groups[like, run.in_flight, run.input_tokens, run.output_tokens].append(run)
        pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
        unlike = [(a, b) for a, b in pairs if getattr(a.setup, name) != getattr(b.setup, name)]
        for least in (0.0, 0.1):
            clear = [(a, b) for a, b in unlike if max(a.token_s / b.token_s, b.token_s / a.token_s) > 1 + least]
            right = sum((a.token_s < b.token_s) == (rates[a] < rates[b]) for a, b in clear)
            if clear:
                apart = f", more than {least:.0%} apart" if least else ""
                yield f"pairs that differ in the {name}{apart}: {right} of {len(clear)} in the right order"


@cache
def served_of(setup: Setup) -> EngineModel:
    return served(setup.engine, setup.shape, device_of(setup.kind), setup.tensor_parallel, setup.data_parallel)


def cost_point(point: Mapping[str, Any]) -> float | None:
    """The most tokens per second and device, in and out, at no less than the published rate per user."""
    best = None
    for tensor, ranks in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)):
        try:
            model = served_of(Setup(point["engine"], point["kind"], point["model"], point["precision"], tensor, ranks))
        except UnknownShape:
            continue
        for in_flight in range(ranks, MOST_IN_FLIGHT + 1, ranks):
            each_s = steady_token_s(model, in_flight, point["input_tokens"], point["output_tokens"])
            if each_s * point["user_tokens_per_s"] > 1:
                break
            rate = in_flight * (1 + point["input_tokens"] / point["output_tokens"]) / each_s / (tensor * ranks)
            best = max(best or 0.0, rate)
    return best


def costs() -> Iterator[str]:
    yield "| point | published tok/s | predicted | published $/M | predicted | error |"
    yield "|---|---|---|---|---|---|"
    errors = []
    for point in KNOWN["points"]:
        rate = cost_point(point)
        usd = 1e6 * point["usd_per_hour"] / 3600 / rate if rate else float("nan")
        error = usd / point["usd_per_million_tokens"] - 1
        errors.append((abs(error), point["name"]))
        yield (
            f"| {point['name']} | {point['device_tokens_per_s']:,} | {rate or 0:,.0f} | "
            f"{point['usd_per_million_tokens']:.3f} | {usd:.3f} | {error:+.0%} |"
        )
    worst, name = max(errors)
    yield f"\nmedian error {median(error for error, _ in errors):.1%} of {len(errors)}, worst {worst:.0%} ({name})"


def rates(runs: Sequence[Run]) -> Iterator[str]:
    """Tokens per second and device, and so cost at any price, by model and kind of device."""
    groups = defaultdict(list)
    for run in runs:
        seconds = steady_token_s(served_of(run.setup), run.in_flight, run.input_tokens, run.output_tokens)
        error = run.tokens_per_s(run.token_s) / run.tokens_per_s(seconds) - 1
        groups[run.setup.model.split("/")[-1], run.setup.precision, run.setup.kind, run.setup.engine].append(abs(error))
    yield "| model | format | device | engine | runs | median error of $ per M tokens |"
    yield "|---|---|---|---|---|---|"
    for key, errors in sorted(groups.items()):
        yield f"| {' | '.join(key)} | {len(errors)} | {median(errors):.0%} |"
    worst, name = max((median(errors), key) for key, errors in groups.items())
    every = [error for errors in groups.values() for error in errors]
    yield f"\nmedian error {median(every):.1%} of {len(every)} runs, worst group {worst:.0%} ({', '.join(name)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the fits for engines.yaml alone")
    parser.add_argument("--rows", type=int, help="only every so many-th run")
    arguments = parsed(parser, rows=100)
    print(machine())
    try:
        runs, every = published(tables_folder().parent / "silicon_sample.csv")
    except NoTables as error:
        print(f"skipped: {error}")
        return
    runs = runs[:: arguments.rows or 1]
    tables: dict[Basis, list[Judged]] = {by: list(judged(runs, by)) for by in ("kernels", "roofline")}
    if arguments.fit:
        print(*(line for by, rows in tables.items() for line in fits_yaml(rows, by)), sep="\n")
        return
    for by, rows in tables.items():
        print(f"\n{by}: {len(rows)} of {every} runs on one node\n", *fits_table(rows), sep="\n")
        setups = by_setup(rows)
        own = [abs(row.error(*fitted(some))) for (_, kind), some in setups.items() if kind != ANY_KIND for row in some]
        if own:
            print(f"\nwith the fits by kind of device: median error {median(own):.1%} of {len(own)}", flush=True)
    print("\norder\n", *order(runs), sep="\n")
    print("\nrates\n", *rates(runs), sep="\n")
    print("\ncost points\n", *costs(), sep="\n")


if __name__ == "__main__":
    main()
