"""The critic as a network: a decoder of the policy's kind with a head of one output, the value.

The value at a response token is V of the tokens before it, which the policy drew it from: it is computed from the same
hidden state as the token's logprob, and by the same pass (rlhfless.functions.policy).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification

from rlhfless.functions.head import OutputHead, at_least_float32
from rlhfless.functions.policy import Form, Outputs, PolicyNetwork
from rlhfless.functions.training.policy import load_trained
from rlhfless.spec import ModelSpec, TrainingSpec
from rlhfless.spec.errors import InputError, Problem


def load_critic(
    source: ModelSpec, critic: TrainingSpec, device: torch.device, mesh: DeviceMesh, *, new_head: bool
) -> PolicyNetwork:
    """Load the model that the critic starts from, split over `mesh`; with `new_head`, its head is of zeros. Raises
    InputError if it has no head of one output, and else as load_trained does. *Collective.*"""
    return load_trained(source, critic, device, mesh, form=NEW_VALUES if new_head else VALUES)


def values_of(critic: PolicyNetwork) -> Outputs:
    """The values `[positions]` that the head gives. In float32: in bfloat16 a value has two digits."""
    return partial(_values, critic.head.linear)


def _values(head: torch.nn.Linear, hidden: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor]:
    bias = None if head.bias is None else at_least_float32(head.bias)
    return (linear(at_least_float32(hidden), at_least_float32(head.weight), bias).squeeze(-1),)


def _value_head(model: Any, chunk_elements: int | None) -> OutputHead:
    inside = f"{model.base_model_prefix}."
    heads = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith(inside)
    ]
    if [head.out_features for head in heads] != [1]:
        what = f"{model.name_or_path!r} has {model.config.num_labels} labels; a critic has one, its value"
        hint = "name a reward model, or leave it out to start from the policy with a new head"
        raise InputError("the critic", [Problem("critic.model", what, hint)])
    return OutputHead(heads[0], 1.0, None, chunk_elements)


VALUES = Form(AutoModelForSequenceClassification, "critic.model", _value_head)
NEW_VALUES = dataclasses.replace(VALUES, config={"num_labels": 1}, new_head=True)
"""Of files without such a head."""
