"""Names that the settings of a spec have in TRL, verl and transformers, for hints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "num_generations": "samples_per_prompt",
        "rollout_n": "samples_per_prompt",
        "max_completion_length": "generation.max_tokens",
        "max_new_tokens": "generation.max_tokens",
        "max_response_length": "generation.max_tokens",
        "response_length": "generation.max_tokens",
        "max_steps": "steps",
        "total_training_steps": "steps",
        "train_batch_size": "prompts_per_step",
        "per_device_train_batch_size": "prompts_per_step",
        "lr": "optimizer.learning_rate",
        "lr_scheduler_type": "optimizer.rate_schedule",
        "eval_steps": "evaluation.every_steps",
        "test_freq": "evaluation.every_steps",
        "save_steps": "checkpoint.every_steps",
        "save_freq": "checkpoint.every_steps",
        "reward_funcs": "rewards",
        "reward_function": "rewards",
        "model_name_or_path": "model.path",
        "dataset_name": "prompts.path",
        "train_dataset": "prompts.path",
        "train_files": "prompts.path",
        "eval_dataset": "prompts.held_out",
        "val_files": "prompts.held_out",
        "output_dir": "output",
        "kl_coef": "algorithm.kl.coefficient",
        "kl_loss_coef": "algorithm.kl.coefficient",
        "torch_dtype": "model.dtype",
    }
)
"""Dotted key of a spec of type `rlhf` by the name elsewhere. Only settings that mean nearly the same are here."""
