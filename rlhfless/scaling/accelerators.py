"""Mapping between Ray's accelerator types and the price book's device kinds. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from rlhfless.util.errors import UserError

NODE_LABEL = "ray.io/node-id"
"""Ray's node label for the node id."""

TYPE_LABEL = "ray.io/accelerator-type"
"""Ray's node label for the accelerator type."""

KINDS: Mapping[str, str] = {
    "A10G": "a10g",
    "A100-40G": "a100-40gb",
    "A100-80G": "a100-80gb",
    "AMD-Instinct-MI300X-OAM": "mi300x",
    "AMD-Instinct-MI325X-OAM": "mi325x",
    "AMD-Instinct-MI355X-OAM": "mi355x",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "GH200": "gh200",
    "H100": "h100",
    "H20": "h20",
    "H200": "h200",
    "L4": "l4",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx-pro-6000",
}
"""Kinds of the price book by Ray's accelerator types."""

AMBIGUOUS: Mapping[str, Mapping[int, str]] = {"A100": {40: "a100-40gb", 80: "a100-80gb"}}
"""Kinds by memory in GiB, for types with several memory sizes."""

MODEL_NAME = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")
"""Matches the maker, then the model: words in capitals up to the first with a digit."""


class UnknownAccelerator(UserError):
    """Raised for devices whose type does not map to a kind of the price book."""


def kind_of(accelerator: str, known: Collection[str], memory_bytes: int | None = None) -> str:
    """Return the price book's kind of an accelerator type. `known` are the kinds in the book.

    A type outside the table maps to the kind of the same name, if the book has it. Raises UnknownAccelerator.
    """
    if accelerator in AMBIGUOUS:
        return _by_memory(accelerator, memory_bytes)
    kind = KINDS.get(accelerator, accelerator.lower())
    if accelerator in KINDS or kind in known:
        return kind
    types = ", ".join(sorted([*KINDS, *AMBIGUOUS]))
    what = f"devices of type {accelerator!r}" if accelerator else "GPUs without a type"
    label = "" if accelerator else f", and start the node with the label {TYPE_LABEL}"
    raise UnknownAccelerator(
        f"{what} are not known; known are {types}. Add a kind {kind!r} to the price book (scaling.prices){label}, or "
        "name another kind with placement.kind"
    )


def type_of(device_name: str) -> str:
    """Return the accelerator type of a device name, as Ray derives it (ray/_private/accelerators/nvidia_gpu.py).

    `NVIDIA A100-SXM4-80GB` is an A100, `NVIDIA RTX PRO 6000 Blackwell Server Edition` an RTX-PRO-6000.
    """
    match = MODEL_NAME.match(device_name)
    name = match.group(1) if match else device_name.removeprefix("NVIDIA").strip()
    return name.replace(" ", "-")


def types_of(kind: str) -> list[str]:
    types = [accelerator for accelerator, of in KINDS.items() if of == kind]
    types += [accelerator for accelerator, sizes in AMBIGUOUS.items() if kind in sizes.values()]
    return types or [kind, kind.upper()]


def _by_memory(accelerator: str, memory_bytes: int | None) -> str:
    sizes = AMBIGUOUS[accelerator]
    if memory_bytes is None:
        raise UnknownAccelerator(
            f"the memory of a device of type {accelerator} could not be read, so it is not known which of "
            f"{', '.join(sizes.values())} it is; start its node with the label {TYPE_LABEL}, such as A100-80G"
        )
    return sizes[min(sizes, key=lambda size_gib: abs(size_gib - memory_bytes / 2**30))]
