"""A model whose loaders cannot take integer codes has nothing that is read back; it still loads its weights."""

from __future__ import annotations

import subprocess
import sys

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
found = chart(model, model.load_weights, published, {0, 1})
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
