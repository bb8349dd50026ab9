"""The optimiser of a rank's shards: clipping by the norm over all ranks, the learning rate, and the state of a
checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlhfless.functions.sharding import copies_of, local
from rlhfless.functions.training.adamw import EightBitAdamW, TorchAdamW
from rlhfless.functions.training.learning_rate import learning_rate
from rlhfless.spec import AdamWSpec


class ShardedAdamW:
    """The optimiser of one rank. All of its state is there from the start, so that a lack of memory shows at once."""

    def __init__(self, model: torch.nn.Module, spec: AdamWSpec) -> None:
        self._spec = spec
        self._parameters = dict(model.named_parameters())
        self._copies = copies_of(next(iter(self._parameters.values())))
        self._adamw = (TorchAdamW if spec.moment_bits == 32 else EightBitAdamW)(self._parameters, spec)
        self.updates = 0

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, before clipping; the same on every rank. *Collective*."""
        gradients = self._gradients()
        squares = torch.stack([torch.linalg.vector_norm(each) for each in gradients]).double().square().sum()
        dist.all_reduce(squares)  # over copies, too, so that all of them clip by the same number
        return float((squares / self._copies).sqrt())

    def forget_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, norm: float, planned: int) -> float:
        """Clip the gradient, whose norm is `norm`, and step, as one of `planned` steps. Returns the learning rate."""
        limit = self._spec.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in self._gradients():
                gradient.mul_(limit / norm)
        self.updates += 1
        rate = learning_rate(self._spec, self.updates, planned)
        self._adamw.step(rate, self.updates)
        self.forget_gradients()
        return rate

    def moments(self) -> list[torch.Tensor]:
        """The tensors of the moments."""
        return [tensor for part in self._adamw.state().values() for tensor in part.values() if tensor.ndim]

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, in place: shards of master weights and moments, and the number of
        updates."""
        return {
            # The model's own file may have a coarser format than the master weights.
            "master_weights": {name: parameter.detach() for name, parameter in self._parameters.items()},
            **self._adamw.state(),
            "updates": torch.tensor(self.updates),
        }

    def set_restored(self, state: dict[str, Any]) -> None:
        """Continue from `state`, whose tensors have been written to in place."""
        self.updates = int(state["updates"])

    def _gradients(self) -> list[torch.Tensor]:
        return [local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]
