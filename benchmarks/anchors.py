"""Published steps, weight loads and sleeps against what the simulator says, row by row.

    python benchmarks/anchors.py [--rows N] [--smoke]

`anchors.yaml` has the rows with their sources. Predictions are the scenarios' defaults and the data sheets; lengths are
lognormal with the published mean, cut off at the published limit. A learner in fp8 is priced as one in bf16. The whole
steps are of models with experts, and three constants were fitted to those on H100: `learner.expert_flops_per_s`
and `learner.expert_tokens`, and the seconds of an all-reduce between nodes (`BETWEEN_NODES_S`); nothing to other rows.
BLIS, which predicts serving latencies, has a median error of 6.7 % on held-out models and devices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rl_steps import CONFIGS, Fit, known_of
from smoke import parsed
from where import machine

from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.fleet_constants import ENGINE_TURN_S
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.roofline import RUNTIME_S, Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.sim.scenarios.cluster import TransportSpec
from rlhfless.sim.scenarios.timing import GB
from rlhfless.sim.scenarios.work import LearnerTimingSpec
from rlhfless.sim.setup import Transport

Row = Mapping[str, Any]

UNITS = {"tokens_per_s": "tokens/s", "mfu": ""}
"""Of the rows that are not in seconds."""


DIGITS = 1000
"""From here on predictions have no decimals."""


@dataclass(frozen=True)
class Judged:
    """A row with its prediction; None where the model is refused."""

    name: str
    published: float
    predicted: float | None
    unit: str
    why: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published - 1


def step_s(row: Row) -> float:
    """With new weights for the engines, for which they stop in every schedule."""
    learner = LearnerTimingSpec()
    weights = {"gb": ModelShape.of_config(CONFIGS[row["model"]]).total_bytes / GB, "devices": row["generation_tp"]}
    return Fit(learner.mfu, learner.expert_flops_per_s).step_s(known_of(row)) + load_s(weights)


def sampling_s(row: Row) -> float:
    return known_of(row).parts[0].generation_s


def tokens_per_s(row: Row) -> float:
    """Of a batch that stays full."""
    model = Roofline(ModelShape.of_config(CONFIGS[row["model"]]), device_of(row["kind"]))
    each = row["in_flight"] // row["engines"]
    return row["in_flight"] / (decode_s(model, each, each * row["context_tokens"], 1) + RUNTIME_S)


def load_s(row: Row) -> float:
    spec = TransportSpec(kind="nccl")  # as in the systems that published these
    rate = spec.device_bytes_per_s * row["devices"]
    return Transport(spec.kind, rate, spec.fixed_s, round(row["gb"] * GB)).load_s


def broadcast_s(row: Row) -> float:
    return float(row["engines"] * row["gb"] / row["link_gb_per_s"])


PREDICTED: Mapping[str, Callable[[Row], float]] = {
    "steps": step_s,
    "sampling": sampling_s,
    "throughput": tokens_per_s,
    "utilisation": lambda row: LearnerTimingSpec().mfu,  # noqa: ARG005
    "loads": load_s,
    "broadcasts": broadcast_s,
    "sleep": lambda row: 2 * ENGINE_TURN_S.value,  # noqa: ARG005
}
"""By the lists of `anchors.yaml`."""


def judged(kind: str, row: Row) -> Judged:
    measure = next(name for name in ("step_s", "seconds", *UNITS) if name in row)
    predicted, why = None, ""
    try:
        if row["model"] in CONFIGS:
            ModelShape.of_config(CONFIGS[row["model"]])
        predicted = PREDICTED[kind](row)
    except UnknownShape as error:
        why = str(error)
    return Judged(name_of(row), row[measure], predicted, UNITS.get(measure, "s"), why)


def name_of(row: Row) -> str:
    if "schedule" not in row:
        return ", ".join(str(row[key]) for key in ("model", "what") if key in row)
    bits = f", {row['bits']} bits" if "bits" in row else ""
    return f"{row['model']}, {row['devices']} x {row['kind']}, {row['schedule'].replace('_', ' ')}{bits}"


def pairs(rows: list[Row]) -> Iterator[str]:
    """What drawing one step ahead brings: seconds of a step against those of a synchronous one on the same devices."""
    yield "| pair | published | predicted | sign | size | parts: drawn, the rest |"
    yield "|---|---|---|---|---|---|"
    same = ("model", "kind", "devices")
    for row in rows:
        synchronous = [each for each in rows if each["schedule"] == "sync" and all(each[k] == row[k] for k in same)]
        if row["schedule"] != "one_step_off" or "bits" in row or not synchronous:
            continue
        (sync,) = synchronous
        sync_s, told = step_s(sync), row["step_s"] / sync["step_s"]
        ratio = step_s(row) / sync_s
        known = known_of(row)
        (part,) = known.parts
        rest_s = known.rest_s(part, LearnerTimingSpec())
        sign = "right" if (ratio < 1) == (told < 1) else "wrong"
        name = f"{row['model']}, {row['devices']} x {row['kind']}"
        parts = f"{part.generation_s:.0f}, {rest_s:.0f} s"
        yield f"| {name} | {told:.2f}x | {ratio:.2f}x | {sign} | {ratio / told - 1:+.0%} | {parts} |"


def table(rows: list[Judged]) -> Iterator[str]:
    yield "| row | published | predicted | error |"
    yield "|---|---|---|---|"
    for row in rows:
        published = f"{row.published:,g} {row.unit}".strip()
        if row.predicted is None or row.error is None:
            yield f"| {row.name} | {published} | refused: {row.why} | |"
        else:
            predicted = f"{row.predicted:,.0f}" if row.predicted >= DIGITS else f"{row.predicted:.3g}"
            yield f"| {row.name} | {published} | {predicted} | {row.error:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="of each kind only the last so many")
    arguments = parsed(parser, rows=2)
    anchors = yaml.safe_load(Path(__file__).with_name("anchors.yaml").read_text("utf-8"))
    print(machine())
    for kind in PREDICTED:
        rows = [judged(kind, row) for row in anchors[kind][-(arguments.rows or 0) :]]
        print(f"\n{kind}\n", *table(rows), sep="\n")
        errors = sorted((abs(row.error), row.name) for row in rows if row.error is not None)
        middle, (worst, name) = median(error for error, _ in errors), errors[-1]
        print(f"\nmedian error {middle:.1%} of {len(errors)}, worst {worst:.0%} ({name})", flush=True)
    print("\none step off against synchronous\n", *pairs(anchors["steps"][-(arguments.rows or 0) :]), sep="\n")


if __name__ == "__main__":
    main()
