"""The model that a critic starts from, judged before anything is started: its head, its tokens and its weights."""

from __future__ import annotations

from typing import Any

from rlhfless.prepare.model import PolicyModel, check_folder, read_config, read_tokenizer
from rlhfless.prepare.model_weights import weight_problems
from rlhfless.spec import ModelSpec, RunSpec
from rlhfless.spec.errors import InputError, Problem

KEY = "critic.model"


def critic_problems(spec: RunSpec, policy: PolicyModel) -> list[Problem]:
    """The problems of the run's critic, if it has one, or of the reward model that it trains, which has such a form."""
    if spec.type == "reward_model":
        return _form_problems(spec.model, read_config(spec.model), new_head=True, key="model.path")
    if spec.critic is None:
        return []
    source = spec.critic_source.model_copy(update={"tokenizer": None})
    try:
        check_folder(source.path, KEY)
        config = read_config(source, KEY)
        if problems := _form_problems(source, config, new_head=spec.critic.new_head):
            return problems
        if spec.critic.new_head:  # its files are the policy's, which are judged as such
            return []
        problems = _token_problems(source, policy)
    except InputError as error:
        return list(error.problems)
    trusted = source.trust_remote_code
    return problems or weight_problems(
        KEY, source.path, "AutoModelForSequenceClassification", trust_remote_code=trusted, config_is_right=True
    )


def _form_problems(source: ModelSpec, config: Any, *, new_head: bool, key: str = KEY) -> list[Problem]:
    """A critic is transformers' classifier of sequences with one label."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not source.trust_remote_code:
        what = f"{source.path!r} is a {config.model_type}, of which transformers has no form with a head of values"
        other = ", or an algorithm without a critic, such as grpo" if key == KEY else ""
        return [Problem(key, what, f"take a policy of another family{other}")]
    if not new_head and config.num_labels != 1:
        what = f"{source.path!r} has {config.num_labels} labels; a critic has one, its value"
        hint = "name a reward model or a critic's checkpoint, or leave it out to start from the policy with a new head"
        return [Problem(KEY, what, hint)]
    return []


def _token_problems(source: ModelSpec, policy: PolicyModel) -> list[Problem]:
    """It reads the policy's tokens, not their text."""
    theirs, ours = read_tokenizer(source, KEY).get_vocab(), policy.tokenizer.get_vocab()
    if theirs == ours:
        return []
    differs = next((token for token in ours if theirs.get(token) != ours[token]), None)
    what = f"{source.path!r} reads other tokens than the policy ({differs or 'it has more'!r} is the first)"
    return [Problem(KEY, what, "name a model with the policy's tokenizer, or leave it out to start from the policy")]
