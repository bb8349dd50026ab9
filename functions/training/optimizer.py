"""AdamW over the shards of a model: warm-up, clipping by the norm over all ranks, and the state of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlhfless.functions.sharding import copies_of, local
from rlhfless.spec import AdamWSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's two moments."""


class ShardedAdamW:
    """The optimiser of one rank. All of its state is there from the start, so that a lack of memory shows at once."""

    def __init__(self, model: torch.nn.Module, spec: AdamWSpec) -> None:
        self._spec = spec
        self._parameters = dict(model.named_parameters())
        self._copies = copies_of(next(iter(self._parameters.values())))
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,  # in place, without a temporary copy of all parameters
        )
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=local(parameter).device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }
        self.updates = 0

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, before clipping; the same on every rank. *Collective*."""
        gradients = self._gradients()
        squares = torch.stack([torch.linalg.vector_norm(each) for each in gradients]).double().square().sum()
        dist.all_reduce(squares)  # over copies, too, so that all of them clip by the same number
        return float((squares / self._copies).sqrt())

    def forget_gradients(self) -> None:
        self._optimizer.zero_grad()

    def step(self, norm: float) -> float:
        """Clip the gradient, whose norm is `norm`, and step. Returns the learning rate."""
        limit = self._spec.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in self._gradients():
                gradient.mul_(limit / norm)
        self.updates += 1
        warmed_up = min(1.0, self.updates / max(self._spec.warmup_steps, 1))
        learning_rate = self._spec.learning_rate * warmed_up
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.forget_gradients()
        return learning_rate

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, in place: shards of master weights and moments, and the number of
        updates."""
        states = {name: self._optimizer.state[parameter] for name, parameter in self._parameters.items()}
        return {
            # The model's own file may have a coarser format than the master weights.
            "master_weights": {name: parameter.detach() for name, parameter in self._parameters.items()},
            **{key: {name: state[key] for name, state in states.items()} for key in ("step", *MOMENTS)},
            "updates": torch.tensor(self.updates),
        }

    def set_restored(self, state: dict[str, Any]) -> None:
        """Continue from `state`, whose tensors have been written to in place."""
        self.updates = int(state["updates"])

    def _gradients(self) -> list[torch.Tensor]:
        return [local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]
