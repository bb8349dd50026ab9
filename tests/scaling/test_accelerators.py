"""Accelerator types and the kinds of the price book."""

from __future__ import annotations

import pytest

from rlhfless.scaling.latency.devices import UnknownAccelerator, kind_of, type_of, types_of
from rlhfless.scaling.prices import load_price_book

BOOK = load_price_book().kinds


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
    ],
)
def test_types_are_named_as_ray_names_them(name: str, accelerator: str) -> None:
    assert type_of(name) == accelerator


def test_a_kind_is_the_price_books() -> None:
    assert kind_of("H100", BOOK) == "h100"
    assert kind_of("AMD-Instinct-MI300X-OAM", BOOK) == "mi300x"
    assert kind_of("GeForce-RTX-5090", [*BOOK, "geforce-rtx-5090"]) == "geforce-rtx-5090"


def test_memory_tells_what_the_type_does_not() -> None:
    # What the drivers report: 40,960 MiB and 81,920 MiB, less some.
    assert kind_of("A100", BOOK, 42_298_834_944) == "a100-40gb"
    assert kind_of("A100", BOOK, 84_987_740_160) == "a100-80gb"
    assert kind_of("A100-80G", BOOK) == "a100-80gb"
    with pytest.raises(UnknownAccelerator, match="memory of a device of type A100 could not be read"):
        kind_of("A100", BOOK)


def test_an_unknown_type_is_refused_with_the_mend() -> None:
    with pytest.raises(
        UnknownAccelerator, match=r"type 'V100' are not known; known are A100, A100-40G, .* kind 'v100' to the"
    ):
        kind_of("V100", BOOK)
    with pytest.raises(UnknownAccelerator, match=r"GPUs without a type .* label ray.io/accelerator-type"):
        kind_of("", BOOK)


def test_a_kind_has_the_types_that_may_be_it() -> None:
    assert types_of("h100") == ["H100"]
    assert types_of("a100-80gb") == ["A100-80G", "A100"]
    assert types_of("v100") == ["v100", "V100"]
