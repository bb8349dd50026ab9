"""Linear layers in 8 bits, whose weights vLLM quantises as it loads them, each version anew.

vLLM 0.32 has this for fp8 (a scale for each output of a layer and for each token). For int8 it has kernels, on GPUs and
on CPUs, but no linear layer that quantises what it loads: ours does. Both are here under names of their own, because
vLLM's refuse float32, in which engines on CPUs compute; of GPUs alone that is right.

Embeddings and the output head are no linear layers of vLLM, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.online.base import _ONLINE_LINEAR_METHODS, OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PtpcOnlineLinearMethod,
    OnlineLinearBase,
    _is_tp_sharded,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    amax_for_tp_weight_quant,
    get_fp8_min_max,
    kFp8StaticChannelSym,
    kInt8StaticChannelSym,
    weight_amax,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from rlhfless.functions.generation.vllm.arguments import QUANTIZATION
from rlhfless.spec.generation import Quantised
from rlhfless.weights.quantised import CODES, NO_VNNI, Codes, multiplies_int8_exactly


class _OnLoading(OnlineQuantizationConfig):
    """All linear layers and experts in a format."""

    key: ClassVar[QuantKey]

    def __init__(self) -> None:
        spec = QuantSpec(weight=self.key)
        super().__init__(QuantizationConfigArgs(linear=spec, moe=spec))

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [*super().get_supported_act_dtypes(), *([torch.float32] if current_platform.is_cpu() else [])]


INEXACT = f"generation.quantization is int8, but {NO_VNNI}. Set it to fp8 or off"


class Int8Config(_OnLoading):
    """See this module. Raises RuntimeError where products would not be those of the codes."""

    key = kInt8StaticChannelSym

    def __init__(self) -> None:
        if current_platform.is_cpu() and not multiplies_int8_exactly():
            raise RuntimeError(INEXACT)
        super().__init__()


class Fp8Config(_OnLoading):
    """See this module."""

    key = kFp8StaticChannelSym


class Int8LinearMethod(OnlineLinearBase):
    """Products of int8, with a scale for each output, and one for each token that is taken as it comes."""

    activation_quant_key = None

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """See LinearMethodBase."""
        super().create_weights(layer, *args, **kwargs)
        self.kernel: Any = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
        )
        self._scales: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise what was loaded, and pack it for the kernel."""
        weight = getattr(layer, "weight", None)
        if weight is None or weight.dtype == CODES["int8"].dtype:  # vLLM asks once more when all layers are loaded
            return
        largest = amax_for_tp_weight_quant(
            weight_amax(weight, dim=-1, keepdim=True), _is_tp_sharded(layer, reduces_output_dim=False)
        )
        scales = CODES["int8"].scales(largest)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        replace_parameter(layer, "weight", CODES["int8"].of(weight, scales))
        replace_parameter(layer, "weight_scale", scales)
        self.kernel.process_weights_after_loading(layer)
        # oneDNN's handler has the address of these, and a reload copies them to the parameter's old place.
        self._scales = layer.weight_scale

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See LinearMethodBase."""
        return cast(torch.Tensor, self.kernel.apply_weights(layer, x, bias))

    def drop(self) -> None:
        """Give up the weights that a CPU kernel has packed; the next load makes them again."""
        if hasattr(self.kernel, "dnnl_handler"):
            self.kernel.dnnl_handler = None


def install() -> None:
    """Make our formats known to the vLLM of this process. Idempotent."""
    _ONLINE_LINEAR_METHODS[kInt8StaticChannelSym] = Int8LinearMethod
    configs: Mapping[Quantised, type[_OnLoading]] = {"int8": Int8Config, "fp8": Fp8Config}
    for quantization, config in configs.items():
        register_quantization_config(QUANTIZATION[quantization])(config)


def codes_of(layer: torch.nn.Module) -> Codes | None:
    """The codes of a linear layer's weight; None if it is as it was published."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, Int8LinearMethod):
        return CODES["int8"]
    if isinstance(method, Fp8PtpcOnlineLinearMethod):
        _, top = get_fp8_min_max()
        return Codes(current_platform.fp8_dtype(), top, 1 / (top * 512))
    return None


def input_format(layer: Any) -> tuple[torch.device, torch.dtype]:
    """Where and in which format a linear layer, quantised or not, takes its inputs."""
    if codes_of(layer) is None:
        return layer.weight.device, layer.weight.dtype
    return layer.weight_scale.device, layer.orig_dtype
