"""A lack of memory is told with the phase, the plan's figure and what was seen."""

from __future__ import annotations

import pytest
import torch

from rlhfless.functions.devices import GIB, OutOfMemory, engine_fault, naming_memory_errors

PLANNED = {"learn": 3 * GIB, "generate": GIB // 2}


def of_the_cpu() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)  # more than an address space has
    return raised.value


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(), of_the_cpu()]
)
def test_a_learner(error: Exception) -> None:
    with pytest.raises(OutOfMemory) as told, naming_memory_errors("learner rank 0", "learn", PLANNED):
        raise error
    assert str(told.value).startswith(
        "learner rank 0 ran out of memory in `learn` (the memory plan counts 3.00 GiB for it): "
    )
    assert "GiB were held at most; " in str(told.value)
    assert "`rlhfless plan`" in str(told.value)


def test_another_error_is_left_alone() -> None:
    with pytest.raises(ValueError, match="nothing to do with it"), naming_memory_errors("learner", "learn", {}):
        raise ValueError("nothing to do with it")


def test_an_engine_that_ended_for_another_reason() -> None:
    assert engine_fault("the engine's process failed:\nKeyError: 'no such layer'", PLANNED) is None
