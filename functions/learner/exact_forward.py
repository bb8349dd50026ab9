"""The probe: a forward pass with the published weights, in float32.

A second model of the same class holds no data. Before a decoder layer runs, its weights are gathered from the shards in
published form; afterwards they are dropped. The shards are unchanged, and a device holds at most one layer in addition
to embeddings and head.

If engines quantise, the second model does too: weights and inputs of linear layers are rounded to codes. An activation
near the border between two codes may get the other code in an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlhfless.functions.lm_head import output_head
from rlhfless.functions.loading import build_blank
from rlhfless.functions.policy import PolicyNetwork
from rlhfless.functions.sharding import layers_of
from rlhfless.functions.training.publishing import named_tensors
from rlhfless.spec.generation import Quantization
from rlhfless.weights.samples import FP8

Fetch = Callable[[str, torch.Tensor], torch.Tensor]
"""(name, the model's tensor) -> the whole tensor to compute with. Collective."""


class ExactForward:
    """A copy of a policy's model without parameters. It shares the policy's buffers."""

    def __init__(self, policy: PolicyNetwork, *, trust_remote_code: bool, quantization: Quantization = "off") -> None:
        self._source = policy.model
        twin = build_blank(AutoModelForCausalLM, policy.model.config, trust_remote_code=trust_remote_code).eval()
        twin.tie_weights()
        buffers = dict(policy.model.named_buffers())
        for prefix, module in twin.named_modules():
            for name, _ in module.named_buffers(recurse=False):
                setattr(module, name, buffers[f"{prefix}.{name}" if prefix else name])
        self._layers = {f"{name}.": module for name, module in twin.named_modules() if module in set(layers_of(twin))}
        self._owners = _owners(twin)
        self._codes = None if quantization == "off" else FP8
        self._coded = self._quantise_inputs() if self._codes is not None else set()
        """Names of the weights that are rounded to codes."""
        self._policy = dataclasses.replace(
            policy, model=twin, decoder=twin.get_decoder(), head=output_head(twin), mesh=None
        )

    def _quantise_inputs(self) -> set[str]:
        """Make linear layers round their inputs; return the names of their weights."""
        names = set()
        for prefix, layer in self._layers.items():
            for name, module in layer.named_modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(lambda _, taken: (self._in_codes(taken[0]),))
                    names.add(f"{prefix}{name}.weight")
        return names

    def _in_codes(self, values: torch.Tensor) -> torch.Tensor:
        """Round each row of `values` [..., width] to codes."""
        assert self._codes is not None, "asked where engines quantise"
        rows = values.reshape(-1, values.shape[-1])
        return self._codes.as_drawn_with(rows, rows.abs().amax(1)).to(values.dtype).view_as(values)

    @torch.no_grad()
    def logprobs(self, token_ids: tuple[int, ...], fetch: Fetch) -> tuple[float, ...]:
        """Return logprobs `[probe - 1]` at temperature 1 of each token after the first. *Collective*."""
        tokens = torch.tensor([token_ids], device=self._policy.device)
        tensors = {name: tensor for name, tensor in named_tensors(self._source).items() if name in self._owners}
        outside = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(self._layers))}
        with self._filled(outside, fetch), self._filled_in_turn(tensors, fetch):
            hidden = self._policy.hidden_states(tokens[:, :-1])[0]
            logprobs = self._policy.head.logits(hidden).log_softmax(-1)
        return tuple(logprobs.gather(1, tokens[0, 1:, None]).squeeze(1).tolist())

    @contextmanager
    def _filled_in_turn(self, tensors: Mapping[str, torch.Tensor], fetch: Fetch) -> Iterator[None]:
        """Fill each layer while it runs."""
        with ExitStack() as hooks, ExitStack() as running:
            for prefix, layer in self._layers.items():
                of_layer = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

                def begin(*_: Any, of_layer: Mapping[str, torch.Tensor] = of_layer) -> None:
                    running.enter_context(self._filled(of_layer, fetch))

                def end(*_: Any) -> None:
                    running.close()

                hooks.callback(layer.register_forward_pre_hook(begin).remove)
                hooks.callback(layer.register_forward_hook(end).remove)
            yield

    @contextmanager
    def _filled(self, tensors: Mapping[str, torch.Tensor], fetch: Fetch) -> Iterator[None]:
        """Fill parameters of the copy within the block."""
        blanks = {name: getattr(module, leaf) for name in tensors for module, leaf in self._owners[name][:1]}
        try:
            for name, tensor in tensors.items():
                value = fetch(name, tensor)
                value = self._in_codes(value) if name in self._coded else value
                self._put(name, torch.nn.Parameter(value, requires_grad=False))
            yield
        finally:
            for name, blank in blanks.items():
                self._put(name, blank)

    def _put(self, name: str, parameter: torch.nn.Parameter) -> None:
        for module, leaf in self._owners[name]:
            setattr(module, leaf, parameter)


def _owners(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Return the modules that hold each parameter, with their name for it. A tied parameter has several."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[torch.nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[names[parameter]].append((module, leaf))
    return owners
