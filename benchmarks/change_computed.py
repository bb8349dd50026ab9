"""Seconds of a change of size of a 7B run on H100 by part, computed from assumed rates: nothing is measured here. Pure.

    python benchmarks/change_computed.py [--smoke]

It prints the table of docs/elastic.md: a co-located run saves the state of its learner, stops, and starts on another
number of GPUs of its node. The state does not depend on the number, and storage, not GPUs, limits how fast it moves.
Engines on GPUs that it keeps stay up; beyond min_actors, those on new GPUs start while the others generate. So the
seconds are those of any two sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from smoke import print_computed
from step_computed import SHAPE
from weights_computed import MODELS, shared_memory

from rlhfless.scaling.latency.roofline import DISK_BYTES_PER_S, weight_load_s

STATE_BYTES = 12 * SHAPE.parameters
"""Master weights and moments in float32."""

STORAGE = {"fast": 10e9, "slow": 3e9}
"""Bytes per second that all ranks together write and read. Assumed: NVMe drives of the node, or a parallel file
system; and a single drive."""

STOP_S = 5.0
"""Assumed: 5.6 s were seen on two busy cores, most of it until Serve has ended the replicas."""

RANKS_S = 15.0
"""Assumed: ranks start within 20 s on two busy cores, with their imports and their process group."""

LOAD_CHECKS_S = 1.0
"""Assumed: read-back and probe."""


def parts(rate: float) -> Mapping[str, float]:
    """Return the seconds of each part, in order; none overlaps with another."""
    return {
        "save: state, and the model": (STATE_BYTES + SHAPE.total_bytes) / rate,
        "stop": STOP_S,
        "start: ranks, and their model from a disk": RANKS_S + weight_load_s(SHAPE, DISK_BYTES_PER_S),
        "restore: state": STATE_BYTES / rate,
        "publish, load and check the weights": shared_memory(MODELS[0], True) + LOAD_CHECKS_S,
    }


def table() -> str:
    """The table of docs/elastic.md."""
    columns = [parts(rate) for rate in STORAGE.values()]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    rows.append(("change", *(sum(column.values()) for column in columns)))
    heads = " | ".join(f"storage {rate / 1e9:.0f} GB/s" for rate in STORAGE.values())
    return "\n".join(
        [f"| seconds (computed) | {heads} |", "|---|--:|--:|", *(f"| {n} | {a:.1f} | {b:.1f} |" for n, a, b in rows)]
    )


def main() -> None:
    print_computed(__doc__, table)


if __name__ == "__main__":
    main()
