"""A fake "cuda" device for torch: it can hold tensors without data, and computes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed import sharding_utils

from rlhfless.functions import loading, policy_loading


class _NoStream:
    """A fake of streams and events, whose order does not matter because nothing is computed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., _NoStream]:
        return _NoStream


@contextlib.contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch, ranks: int) -> Iterator[DeviceMesh]:
    """Act as rank 0 of `ranks` GPUs within the block, and yield their mesh.

    Tensors have no data, so checks that read data while a model is loaded are skipped.
    """
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _NoStream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(loading, "is_finite", lambda _: True)
    for name in ("_check_against_model", "_choose_attention", "_can_fuse_head"):
        monkeypatch.setattr(policy_loading, name, lambda *_: None)
    offset = sharding_utils.compute_local_shape_and_global_offset

    def with_data(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return offset(*arguments)

    monkeypatch.setattr(sharding_utils, "compute_local_shape_and_global_offset", with_data)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh
    finally:
        dist.destroy_process_group()
