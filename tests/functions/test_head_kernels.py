"""The fused head: in Triton's interpreter against the plain head, and compiled for H100, without a GPU."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.functions import policy_loading
from rlhfless.functions.lm_head import OutputHead

pytest.importorskip("triton", reason="Triton, which torch's CPU wheels do not bring, is not installed")

from rlhfless.functions import head_kernels

CASES = [
    (vocabulary, scale, cap, bias)
    for vocabulary in (1000, 1024, 300)  # blocks of 256: no multiple, a multiple, and one block that is not full
    for scale, cap, bias in ((1.0, None, False), (0.5, 30.0, True))
]
ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2}

KERNELS = (head_kernels._forward, head_kernels._backward)


def interpret() -> None:
    """Prints the differences of all cases, and of no positions and of passes without a gradient. Runs in a process of
    its own: Triton reads TRITON_INTERPRET once."""
    head_kernels.BLOCK = 256
    found: dict[str, list[float]] = {name: [] for name in ALLOWED}
    for name, (vocabulary, scale, cap, bias) in itertools.product(ALLOWED, CASES):
        head = OutputHead(torch.nn.Linear(8, vocabulary, bias=bias), scale, cap)
        found[name].append(head_kernels.fused_difference(head, torch.device("cpu"), getattr(torch, name)))
    fused = OutputHead(torch.nn.Linear(8, 300), 1.0, None)
    hidden, targets = torch.randn(5, 8, requires_grad=True), torch.arange(5)
    nothing = head_kernels.fused_logprobs(fused, hidden[:0], targets[:0], 0.7, "value")
    nothing[0].sum().backward()
    with torch.no_grad():
        (alone,) = head_kernels.fused_logprobs(fused, hidden, targets, 0.7)
    logprobs, entropy = head_kernels.fused_logprobs(fused, hidden, targets, 0.7, "value")
    told = {
        "empty": [list(each.shape) for each in nothing],
        "same": torch.equal(alone, logprobs),
        "gradients": [alone.requires_grad, logprobs.requires_grad, entropy.requires_grad],
    }
    print(json.dumps(found | told))


def test_interpreted_kernels_are_the_plain_head() -> None:
    """Two and more blocks of rows, and a single one; with an entropy that has a gradient."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.functions.test_head_kernels import interpret; interpret()"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name, allowed in ALLOWED.items():
        for case, difference in zip(CASES, found[name], strict=True):
            assert difference < allowed, (name, case)
    assert found["empty"] == [[0], [0]]
    assert found["same"]
    assert found["gradients"] == [False, True, False]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("entropy", [False, True])
def test_kernels_compile_for_h100(kernel: Any, entropy: bool, tmp_path: Path, monkeypatch: Any) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"CAPPED": True, "ENTROPY": entropy, "BLOCK": head_kernels.BLOCK}
    names = [name for name in kernel.arg_names if name not in constants]
    types = ["*bf16", "*i64", *["*fp32"] * (len(names) - 6), "i32", "fp32", "fp32", "fp32"]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": head_kernels.WARPS})
    assert "cubin" in built.asm


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (0.01, ""),
        (0.2, "differ by 0.2 of the largest"),
        (RuntimeError("no such arch\nsm_20"), "RuntimeError: no such arch"),
    ],
)
def test_a_head_that_differs_stays_plain_and_the_reason_is_logged(
    found: Any, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def difference(*_: Any) -> float:
        if isinstance(found, Exception):
            raise found
        return float(found)

    monkeypatch.setattr(head_kernels, "fused_difference", difference)
    network: Any = SimpleNamespace(device=torch.device("cuda"), head=None, most=lambda count: count)
    with caplog.at_level(logging.WARNING):
        assert policy_loading._can_fuse_head(network, "m", torch.bfloat16) is not bool(text)
    assert text in caplog.text
    network.device = torch.device("cpu")
    assert not policy_loading._can_fuse_head(network, "m", torch.bfloat16)
