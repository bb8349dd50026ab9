"""What an index of the tensors to read back costs, and what happens where it cannot be made."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: what imports vLLM must not have imported numba, as other tests have.
UNREADABLE = """
import torch
from rlhfless.functions.generation.vllm.read_back import index_tensors

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def load_weights(self, tensors):
        for name, tensor in tensors:
            loader = getattr(self.scale, "weight_loader", None)
            if not tensor.is_floating_point():
                raise RuntimeError("rms_norm takes floating point alone")
            self.scale.data.copy_(tensor)

model = Model()
published = [("scale", torch.arange(4.0))]
layout = {name: tuple(tensor.shape) for name, tensor in published}
found = index_tensors(model, model.load_weights, layout, {0, 1}, torch.device("cpu"))
assert found.held == (), found
assert found.compare(model, {}) == {}
assert not hasattr(model.scale, "weight_loader")
assert model.scale.tolist() == [1.0] * 4
model.load_weights(published)
assert model.scale.tolist() == [0.0, 1.0, 2.0, 3.0]
"""


# A mixture of 128 experts beside a linear layer and a fused one; every operation on tensors counts its elements.
EXPERTS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from types import SimpleNamespace
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from rlhfless.functions.generation.vllm.read_back import index_tensors

EXPERTS, WIDTH = 128, 64

class Counted(TorchDispatchMode):
    elements = 0
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        answer = function(*arguments, **(keywords or {}))
        if not function.is_view:
            of = [one.numel() for one in (*arguments, answer) if isinstance(one, torch.Tensor)]
            self.elements += max(of, default=0)
        return answer

def part(parameter, loaded, start):
    parameter.data[start : start + len(loaded)].copy_(loaded)

LOCAL = {number: number - 2 for number in range(2, EXPERTS)}  # the first two are another worker's

def expert(param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
    if expert_id not in LOCAL:
        return False
    data = param.data[LOCAL[expert_id]]
    half = len(data) // 2
    {"w1": data[:half], "w3": data[half:], "w2": data}[shard_id].copy_(loaded_weight)
    return True

def fused(backend):
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.unquantized_backend, method.moe = backend, SimpleNamespace(is_act_and_mul=True)
    return method

class Layer(torch.nn.Module):
    def __init__(self, name, shape, loader, method):
        super().__init__()
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.weight_loader = loader
        self.register_parameter(name, parameter)
        self.quant_method = method
        self._map_global_expert_id_to_local_expert_id = lambda number: LOCAL.get(number, -1)
        self.cpu_linear = torch.nn.functional.linear  # what vLLM sets on CPUs for weights that are not packed

class Model(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.qkv = Layer("weight", (3 * WIDTH, WIDTH), part, UnquantizedLinearMethod())
        self.w13 = Layer("w13_weight", (len(LOCAL), 2 * WIDTH, WIDTH), expert, fused(backend))
        self.w2 = Layer("w2_weight", (len(LOCAL), WIDTH, WIDTH), expert, fused(backend))

    def load_weights(self, tensors):
        for name, tensor in tensors:
            kind, number = name.split(".")
            if kind == "qkv":
                self.qkv.weight.weight_loader(self.qkv.weight, tensor, int(number) * WIDTH)
                continue
            of = self.w2.w2_weight if kind == "w2" else self.w13.w13_weight
            of.weight_loader(param=of, loaded_weight=tensor, weight_name=name, shard_id=kind, expert_id=int(number),
                             return_success=True)

published = [(f"qkv.{i}", torch.randn(WIDTH, WIDTH)) for i in range(3)]
published += [(f"{kind}.{i}", torch.randn(WIDTH, WIDTH)) for i in range(EXPERTS) for kind in ("w1", "w3", "w2")]
size = sum(tensor.numel() for _, tensor in published)

def indexed(backend):
    model = Model(backend)
    with Counted() as counted:
        layout = {name: tuple(tensor.shape) for name, tensor in published}
        found = index_tensors(model, model.load_weights, layout, {0, 1}, torch.device("cpu"))
    # Of each load some passes over one expert's part; over all of them it would be more than a hundred times as many.
    assert counted.elements < 24 * size, (counted.elements, size)
    return model, found

# Where the kernel has an order of its own, experts are not read.
assert [held.parameter for held in indexed(UnquantizedMoeBackend.CPU)[1].held] == ["weight"]
model, found = indexed(UnquantizedMoeBackend.TRITON)
assert [held.parameter for held in found.held] == ["weight", "w13_weight", "w2_weight"]
assert [name for name, _ in found.held[0].parts] == ["qkv.0", "qkv.1", "qkv.2"]

model.load_weights(published)
from rlhfless.weights.samples import weight_sample
samples = {name: weight_sample(tensor, {0, 1}, tensor.dtype) for name, tensor in published}
compared = found.compare(model, samples)
here = {name for name, _ in published} - {f"{kind}.{i}" for i in (0, 1) for kind in ("w1", "w3", "w2")}
assert set(compared) == here and not any(wrong for _, wrong in compared.values()), compared
name, elements = found.held[1].parts[1]
assert name == "w3.2"
where = found.held[1].indices[len(found.held[1].parts[0][1])]
model.w13.w13_weight.data.view(-1)[where] += 1
assert {name for name, (_, wrong) in found.compare(model, samples).items() if wrong} == {"w3.2"}

# A kernel that has the up projection's half first.
swapped, of_swapped = indexed(UnquantizedMoeBackend.FLASHINFER_CUTLASS)
swapped.load_weights(published)
assert any(wrong for _, wrong in of_swapped.compare(swapped, samples).values())
swapped.w13.w13_weight.data = torch.cat(swapped.w13.w13_weight.data.chunk(2, dim=1)[::-1], dim=1)
compared = of_swapped.compare(swapped, samples)
assert set(compared) == here and not any(wrong for _, wrong in compared.values())
"""


@pytest.mark.long
def test_a_model_that_cannot_take_codes_is_loaded_and_not_read_back_and_an_index_of_experts_is_cheap() -> None:
    """Both in one process: vLLM takes ten seconds of a processor to be imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"{UNREADABLE}\n{EXPERTS}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "no weights can be read back from Model, whose loaders fail" in done.stderr
