"""AdamW (arXiv 1711.05101) over one rank's shards: clipping by the global norm, learning rate, checkpoint state.

`WeightAverage` keeps an exponential moving average of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlhfless.algorithms.passes import learning_rate
from rlhfless.functions.expert_parallel import is_expert
from rlhfless.functions.lora import trained_parameters
from rlhfless.functions.sharding import copies_of, local
from rlhfless.spec import AdamWSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's two moments."""


def decays(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has weight decay: matrices and embeddings do, norms and biases do not.

    As in nanoGPT, Megatron-LM and the Hugging Face Trainer.
    """
    return parameter.ndim > 1


class ShardedAdamW:
    """torch's AdamW on one rank. Allocates all state at once, so running out of memory shows before the first step."""

    def __init__(self, model: torch.nn.Module, spec: AdamWSpec) -> None:
        self._spec = spec
        self._parameters = trained_parameters(model)
        self._adamw = self._torch_adamw()
        self.updates = 0

    def _torch_adamw(self) -> torch.optim.AdamW:
        parameters = self._parameters.values()
        # The fused kernel takes tensors of one mesh: experts have their own.
        groups = [
            {
                "params": [p for p in parameters if decays(p) == matrices and is_expert(p) == experts],
                "weight_decay": self._spec.weight_decay if matrices else 0.0,
            }
            for matrices in (True, False)
            for experts in (False, True)
        ]
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self._spec.learning_rate,
            betas=self._spec.betas,
            eps=self._spec.eps,
            fused=True,  # in place, without a temporary copy of all parameters
        )
        for parameter in parameters:
            adamw.state[parameter] = {
                "step": torch.zeros((), device=local(parameter).device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }
        return adamw

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient before clipping, equal on every rank. *Collective*."""
        pairs = [(each.grad, copies_of(each)) for each in self._parameters.values() if each.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(local(gradient)) for gradient, _ in pairs])
        copies = torch.tensor([number for _, number in pairs], device=norms.device)
        squares = (norms.double().square() / copies).sum()
        dist.all_reduce(squares)  # over copies as well, so that all clip by the same number
        return float(squares.sqrt())

    def forget_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, norm: float, planned: int) -> float:
        """Clip the gradient, given its `norm`, and take one of `planned` steps. Return the learning rate."""
        limit = self._spec.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in self._gradients():
                gradient.mul_(limit / norm)
        self.updates += 1
        rate = learning_rate(self._spec, self.updates, planned)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.forget_gradients()
        return rate

    def moments(self) -> list[torch.Tensor]:
        """Return the tensors of both moments."""
        return [self._adamw.state[parameter][moment] for moment in MOMENTS for parameter in self._parameters.values()]

    def state(self) -> dict[str, Any]:
        """Return the state to checkpoint, in place: shards of master weights and moments, and the update count."""
        states = {name: self._adamw.state[parameter] for name, parameter in self._parameters.items()}
        return {
            # The model's own file may have lower precision than the master weights.
            "master_weights": {name: parameter.detach() for name, parameter in self._parameters.items()},
            **{key: {name: state[key] for name, state in states.items()} for key in ("step", *MOMENTS)},
            "updates": torch.tensor(self.updates),
        }

    def set_restored(self, state: dict[str, Any]) -> None:
        """Resume from `state`, whose tensors were written in place."""
        self.updates = int(state["updates"])

    def _gradients(self) -> list[torch.Tensor]:
        return [local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]


class WeightAverage:
    """Updates a <- d a + (1 - d) w after each optimiser step, in float32, starting from the initial weights.

    Mean Teacher, arXiv 1703.01780.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: parameter.detach() for name, parameter in trained_parameters(model).items()}
        self.tensors: Mapping[str, torch.Tensor] = {name: weight.clone() for name, weight in self._weights.items()}
        """Averages by parameter, sharded like the parameters."""

    def update(self) -> None:
        """Add the current weights. Call after each optimiser step."""
        for average, weights in self._pairs():
            average.lerp_(weights, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap weights and average within the block. Both return bitwise, without a second copy of all weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, weights in self._pairs():
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's shards of average and weights."""
        for name, weights in self._weights.items():
            yield local(self.tensors[name]), local(weights)
