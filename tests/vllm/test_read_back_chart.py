"""What a chart of the read-back costs, where it is kept, and what happens where it cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# In a process of its own: what imports vLLM must not have imported numba, as other tests have.
PROGRAM = """
import torch
from rlhfless.functions.generation.vllm.read_back import chart

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
found = chart(model, model.load_weights, published, {0, 1}, torch.device("cpu"))
assert found.held == (), found
assert found.compare(model, {"scale": b""}) == {}
assert not hasattr(model.scale, "weight_loader")
assert model.scale.tolist() == [1.0] * 4
model.load_weights(published)
assert model.scale.tolist() == [0.0, 1.0, 2.0, 3.0]
"""


def test_a_model_that_cannot_take_codes_is_loaded_and_not_read_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "no weights can be read back from Model, whose loaders fail" in done.stderr


# A mixture of 128 experts beside a linear layer and a fused one; every operation on tensors counts its elements.
EXPERTS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from rlhfless.functions.generation.vllm.charts import kept_or_made
from rlhfless.functions.generation.vllm.read_back import chart

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

def expert(parameter, loaded, number):
    parameter.data[number].copy_(loaded)

class Layer(torch.nn.Module):
    def __init__(self, name, shape, loader, method):
        super().__init__()
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.weight_loader = loader
        self.register_parameter(name, parameter)
        self.quant_method = method
        self.cpu_linear = torch.nn.functional.linear  # what vLLM sets on CPUs for weights that are not packed

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = Layer("weight", (3 * WIDTH, WIDTH), part, UnquantizedLinearMethod())
        self.experts = Layer("w2_weight", (EXPERTS, WIDTH, WIDTH), expert, object())

    def load_weights(self, tensors):
        for name, tensor in tensors:
            kind, number = name.split(".")
            if kind == "qkv":
                self.qkv.weight.weight_loader(self.qkv.weight, tensor, int(number) * WIDTH)
            else:
                self.experts.w2_weight.weight_loader(self.experts.w2_weight, tensor, int(number))

model = Model()
published = [(f"qkv.{i}", torch.randn(WIDTH, WIDTH)) for i in range(3)]
published += [(f"experts.{i}", torch.randn(WIDTH, WIDTH)) for i in range(EXPERTS)]
size = sum(tensor.numel() for _, tensor in published)
with Counted() as counted:
    found = chart(model, model.load_weights, published, {0, 1}, torch.device("cpu"))
assert counted.elements < 8 * size, (counted.elements, size)
assert [held.parameter for held in found.held] == ["weight"]
assert [name for name, _ in found.held[0].parts] == ["qkv.0", "qkv.1", "qkv.2"]

model.load_weights(published)
from rlhfless.weights.samples import sampled_values
samples = {name: sampled_values(tensor, {0, 1}, tensor.dtype) for name, tensor in published}
compared = found.compare(model, samples)
assert set(compared) == {"qkv.0", "qkv.1", "qkv.2"} and not any(wrong for _, wrong in compared.values()), compared

# A second engine of the node finds the chart; one whose file is damaged makes its own.
kept_or_made("key", model, lambda: found)
again = kept_or_made("key", Model(), lambda: 1 / 0)
other = Model()
other.load_weights(published)
again = kept_or_made("key", other, lambda: 1 / 0)
assert again.compare(other, samples) == compared
other.qkv.weight.data[5, 0] += 1
assert sum(wrong for _, wrong in again.compare(other, samples).values()) >= 1
from rlhfless.functions.generation.vllm.charts import charts_folder
(file,) = charts_folder().iterdir()
file.write_bytes(b"no chart")
assert kept_or_made("key", other, lambda: again) is again
"""


def test_a_chart_costs_a_few_passes_over_the_weights_however_many_experts_and_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXPERTS],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"RLHFLESS_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be used, and is made again" in done.stderr
