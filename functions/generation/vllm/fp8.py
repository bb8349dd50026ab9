"""Linear layers in fp8, quantized by vLLM during the load of each version.

There is a scale per output of a layer and one per token. The format is registered under our own name because vLLM's
rejects float32, in which CPU engines compute. Embeddings and the output head are not linear layers in vLLM and keep
the published dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import get_fp8_min_max, kFp8StaticChannelSym
from vllm.platforms import current_platform

from rlhfless.functions.generation.vllm.arguments import QUANTIZATION
from rlhfless.weights.samples import Codes


class Fp8Config(OnlineQuantizationConfig):
    """All linear layers and experts in fp8; also accepts float32 on CPUs."""

    def __init__(self) -> None:
        spec = QuantSpec(weight=kFp8StaticChannelSym)
        super().__init__(QuantizationConfigArgs(linear=spec, moe=spec))

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [*super().get_supported_act_dtypes(), *([torch.float32] if current_platform.is_cpu() else [])]


def install() -> None:
    """Register the format in this process's vLLM. Idempotent."""
    register_quantization_config(QUANTIZATION)(Fp8Config)


def codes_of(layer: torch.nn.Module) -> Codes | None:
    """Return the codes of a linear layer's weight, or None if it is not quantized."""
    if not isinstance(getattr(layer, "quant_method", None), Fp8PtpcOnlineLinearMethod):
        return None
    _, top = get_fp8_min_max()
    return Codes(current_platform.fp8_dtype(), top, 1 / (top * 512))


def input_format(layer: Any) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of a linear layer's inputs."""
    if codes_of(layer) is None:
        return layer.weight.device, layer.weight.dtype
    return layer.weight_scale.device, layer.orig_dtype
