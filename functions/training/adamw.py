"""AdamW (arXiv 1711.05101) over the shards of named parameters: torch's own, or one with moments in 8 bits.

Weight decay is for what has two dimensions or more, embeddings among it, and not for norms and biases: the convention
of nanoGPT, Megatron-LM and the Hugging Face Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from rlhfless.functions.sharding import local
from rlhfless.functions.training.block_quantised import blocks_of, quantised, restored
from rlhfless.spec import AdamWSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's two moments."""

SIGNED = (True, False)
"""Whether each of them can be below 0."""

CHUNK_ELEMENTS = 2**22
"""Numbers whose moments are in float32 at once: some 100 MiB with what is computed from them."""


def decays(parameter: torch.Tensor) -> bool:
    """Whether weight decay is for a parameter: one of matrices, not of a norm or a bias."""
    return parameter.ndim > 1


class TorchAdamW:
    """torch's own, with moments in float32."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: AdamWSpec) -> None:
        self._parameters = parameters
        groups = [
            {"params": [p for p in parameters.values() if decays(p)], "weight_decay": spec.weight_decay},
            {"params": [p for p in parameters.values() if not decays(p)], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,  # in place, without a temporary copy of all parameters
        )
        for parameter in parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=local(parameter).device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }

    def step(self, learning_rate: float, update: int) -> None:  # noqa: ARG002 - torch counts by itself
        """Update all parameters that have a gradient; `update` counts from 1."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of the state, by kind and parameter, in place."""
        states = {name: self._optimizer.state[parameter] for name, parameter in self._parameters.items()}
        return {key: {name: state[key] for name, state in states.items()} for key in ("step", *MOMENTS)}


class EightBitAdamW:
    """Moments of matrices are in 8 bits (rlhfless.functions.training.block_quantised), and in float32 while their part
    of a parameter is updated; those of norms and biases, which are few, always in float32."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: AdamWSpec) -> None:
        self._parameters = parameters
        self._spec = spec
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        for moment in MOMENTS:
            exact, codes, scales = (self._state.setdefault(f"{moment}{kind}", {}) for kind in ("", "_codes", "_scales"))
            for name, parameter in parameters.items():
                if decays(parameter):
                    codes[name] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                    scales[name] = _scales_of(parameter)
                else:
                    exact[name] = torch.zeros_like(parameter, requires_grad=False)

    def step(self, learning_rate: float, update: int) -> None:
        """See TorchAdamW."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self._update(name, local(parameter.detach()), local(parameter.grad), learning_rate, update)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """See TorchAdamW."""
        return self._state

    def _update(
        self, name: str, weights: torch.Tensor, gradient: torch.Tensor, learning_rate: float, update: int
    ) -> None:
        if not decays(weights):
            first, second = (local(self._state[moment][name]) for moment in MOMENTS)
            self._apply(weights, gradient, first, second, learning_rate, update, 0.0)
            return
        for rows in _chunks(weights):
            kept = [self._kept(moment, name, rows) for moment in MOMENTS]
            first, second = (restored(*each, signed=signed) for each, signed in zip(kept, SIGNED, strict=True))
            parts = (weights[rows].flatten(1), gradient[rows].flatten(1))
            self._apply(*parts, first, second, learning_rate, update, self._spec.weight_decay)
            for each, moment, signed in zip(kept, (first, second), SIGNED, strict=True):
                for tensor, fresh in zip(each, quantised(moment, signed=signed), strict=True):
                    tensor.copy_(fresh)

    def _kept(self, moment: str, name: str, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the codes and scales of rows."""
        codes, scales = (local(self._state[f"{moment}_{kind}"][name]) for kind in ("codes", "scales"))
        return codes[rows].flatten(1), scales[rows]

    def _apply(
        self,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        learning_rate: float,
        update: int,
        decay: float,
    ) -> None:
        """Algorithm 2 of the paper, in place."""
        beta1, beta2 = self._spec.betas
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weights.mul_(1 - learning_rate * decay)
        divisor = (second / (1 - beta2**update)).sqrt_().add_(self._spec.eps)
        weights.addcdiv_(first, divisor, value=-learning_rate / (1 - beta1**update))


def _scales_of(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros for the scales of a parameter's moments, `[rows, blocks]`, split as its rows are."""
    part = local(parameter.detach())
    blocks = blocks_of(parameter.numel() // parameter.shape[0])
    scales = part.new_zeros((part.shape[0], blocks), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((parameter.shape[0], blocks))
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(scales, mesh, placements, run_check=False, shape=shape, stride=(blocks, 1))


def _chunks(weights: torch.Tensor) -> Iterator[slice]:
    """Rows that are updated at once."""
    rows = weights.shape[0]
    step = max(1, CHUNK_ELEMENTS * rows // max(weights.numel(), 1))
    yield from (slice(first, first + step) for first in range(0, rows, step))
