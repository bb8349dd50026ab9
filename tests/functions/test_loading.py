"""What a function does with weights that are not whole: it loads none of them, and says which."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fakes.builders import LONG
from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.calls import Call
from rlhfless.functions.kinds import REFERENCE
from rlhfless.functions.loading import is_finite
from rlhfless.functions.per_token import PerTokenFunction, PerTokenSettings
from rlhfless.functions.policy_loading import load_policy
from rlhfless.spec import ModelSpec
from rlhfless.spec.errors import InputError

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, Any] = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, dtype: Any = "float32") -> Any:
    return load_policy(ModelSpec(path=str(folder)), parameter_dtype=dtype, compute_dtype=dtype)


def refusal(folder: Path, dtype: Any = "float32") -> str:
    with pytest.raises(InputError) as caught:
        load(folder, dtype)
    message = str(caught.value)
    assert message.startswith(f"the model {str(folder)!r}: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == message, "it comes from another process"
    return message


def test_a_whole_model_is_loaded_as_it_was_saved(llama: Path) -> None:
    weights = dict(load(llama).model.named_parameters())
    stored = load_file(llama / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_missing_odd_and_strange_tensors_are_told_together(llama: Path) -> None:
    edit(llama, **{UP: None, "lm_head.weight": torch.zeros(41, 32), "v_head.weight": torch.zeros(3)})
    message = refusal(llama)
    assert "3 problems" in message
    assert f"- model.path: the checkpoint lacks tensor '{UP}' [48, 32], which LlamaForCausalLM needs" in message
    assert "has tensor 'lm_head.weight' as [41, 32] instead of [40, 32]" in message
    assert "has tensor 'v_head.weight', which LlamaForCausalLM does not take" in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_told(value: float, dtype: str, llama: Path) -> None:
    weight = load_file(llama / "model.safetensors")[UP]
    weight[3, 5] = value
    edit(llama, **{UP: weight})
    assert f"NaN or infinite values are in tensor '{UP}' (as {dtype})" in refusal(llama, dtype)


def test_values_that_do_not_fit_the_dtype_are_told(llama: Path) -> None:
    edit(llama, **{UP: torch.full((48, 32), 1e6)})
    load(llama, "bfloat16")
    assert f"'{UP}' (as float16)" in refusal(llama, "float16")


def test_a_file_that_is_cut_short_is_told(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "a weight file cannot be read" in refusal(llama)


def test_experts_that_cannot_be_fused_are_told(tmp_path: Path) -> None:
    MixtralForCausalLM(MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4)).save_pretrained(tmp_path)
    name = next(name for name in sorted(load_file(tmp_path / "model.safetensors")) if ".experts.2." in name)
    edit(tmp_path, **{name: None})
    assert "checkpoint" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_is_what_torch_calls_finite(dtype: torch.dtype) -> None:
    for value in (0.0, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).min, *map(float, ("nan", "inf", "-inf"))):
        tensor = torch.ones(5, 7, dtype=dtype)
        tensor[2, 3] = value
        assert is_finite(tensor) == bool(torch.isfinite(tensor).all())
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.arange(3))


async def test_a_replica_that_cannot_load_its_model_says_so_itself(llama: Path, in_process: Any) -> None:
    """Of a constructor that raises, Serve reports a text; the run needs the error."""
    edit(llama, **{UP: None})
    binding = DeviceBinding("cpu", ("0",), exclusive=False)
    model = ModelSpec(path=str(llama))
    settings = PerTokenSettings(
        run_id="run",
        lease=LONG,
        function=REFERENCE.name,
        worker=REFERENCE.worker,
        model=model,
        dtype="float32",
        micro_batch_tokens=100,
        share_prefixes=True,
        temperature=1.0,
        rank_bindings=(binding,),
        call_timeout_s=60,
    )
    function = await in_process(PerTokenFunction, settings)
    with pytest.raises(InputError, match=f"lacks tensor '{UP}'"):
        await function.describe(Call("run", 1, 0))
