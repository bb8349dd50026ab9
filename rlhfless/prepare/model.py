"""Read and check the policy's configuration and tokenizer; its weights are checked in
rlhfless.prepare.model_weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhfless.chat.end_tokens import end_token_ids
from rlhfless.prepare.model_weights import weight_problems
from rlhfless.scaling.latency.attention import UnknownShape, attention_form
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import GIB
from rlhfless.spec import ModelSpec, RunSpec
from rlhfless.spec.data import NOT_HERE, RELATIVE, is_path, shadowed
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest
from rlhfless.util.errors import class_and_line

T = TypeVar("T")

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Properties of the tokenizer that other stages need."""

    path: str
    """Folder or hub name."""
    vocabulary_tokens: int
    eos_token_id: int
    pad_token_id: int
    """The padding token, or the end-of-sequence token if there is none."""
    special_tokens: tuple[str, ...] = ()
    """See `special_tokens`."""


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """The policy as its files describe it, before it is loaded."""

    tokenizer: Any
    """A transformers tokenizer."""
    tokenizer_info: TokenizerInfo
    context_tokens: int | None
    """Longest prompt + response: the spec's limit, else the model's; None if neither sets one."""
    shape: ModelShape | None
    """Sizes for speed estimates; None if its config lacks them."""
    warnings: tuple[str, ...]
    end_token_ids: tuple[int, ...] = ()
    """Further end tokens, from the generation config, at which engines stop."""


def load_policy(spec: ModelSpec) -> PolicyModel:
    """Read configuration and tokenizer from a folder or the hub. Raises InputError with all problems."""
    check_folder(spec.path, "model.path")
    if spec.tokenizer:
        require_name(spec.tokenizer, "model.tokenizer")
    config = read_config(spec)
    tokenizer = read_tokenizer(spec)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    info, warnings = _tokenizer_info(spec, tokenizer, rows)
    problems = [*_kind_problems(spec, config), *_vocabulary_problems(info, rows)]
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and (spec.max_context_tokens or 0) > limit:
        what = f"{spec.max_context_tokens} is above the model's own limit of {limit} tokens"
        problems.append(Problem("model.max_context_tokens", what, f"set it to {limit} or less, or leave it out"))
    if problems:
        raise InputError("model", problems)
    ends = end_token_ids(spec.path)
    return PolicyModel(tokenizer, info, spec.max_context_tokens or limit, _shape(spec, config), warnings, ends)


def check_folder(path: str, field: str) -> None:
    """Require a model folder, or a name that the hub may have. Raises InputError."""
    require_name(path, field)
    if is_path(path):
        _check_files(Path(path), field)
    elif missing := missing_on_hub(path):
        what = f"{path!r}: no such folder, and {missing}"
        raise _error(field, what, f"{RELATIVE}; a hub name needs the network")


def require_name(path: str, field: str) -> None:
    """Require an existing folder or a valid hub name. Raises InputError."""
    folder = Path(path)
    if why := shadowed(path):
        raise _error(field, why, NOT_HERE)
    if os.path.isfile(path):
        raise _error(field, f"{path!r} is a file", "name the folder that holds config.json")
    if not (os.path.isdir(path) if is_path(path) else _HUB_NAME.fullmatch(path)):
        siblings = os.listdir(folder.parent) if is_path(path) and os.path.isdir(folder.parent) else []
        what = f"{path!r}: no such folder, and not a hub name such as `Qwen/Qwen3-0.6B`"
        raise _error(field, what, f"{nearest(folder.name, siblings)}{RELATIVE}")


def missing_on_hub(name: str) -> str:
    """Say why the hub cannot provide a model; empty if it may. Asks once: transformers would retry for half a
    minute."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ""
    if constants.HF_HUB_OFFLINE:
        return "the local hub cache does not have it (HF_HUB_OFFLINE is set)"
    try:
        HfApi().model_info(name, timeout=_HUB_ANSWER_S)
    except GatedRepoError:
        return ""  # transformers says what to do about it
    except RepositoryNotFoundError:
        return f"{constants.ENDPOINT} has no model of that name that you may read"
    except HfHubHTTPError:
        return ""  # a mirror without this call may still have the files
    except Exception as error:  # an error of the HTTP library in use: no connection, no answer
        return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}), nor is it in the local hub cache"
    return ""


def _check_files(folder: Path, field: str) -> None:
    if not (folder / "config.json").is_file():
        hint = "name a folder in Hugging Face format, as `save_pretrained` writes it"
        raise _error(field, f"{str(folder)!r} has no config.json", hint)


def read_config(spec: ModelSpec, field: str = "model.path") -> Any:
    """The configuration of a model, which `field` of the spec names. Raises InputError."""
    from transformers import AutoConfig

    return _loaded(
        lambda: AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code),
        field,
        f"the configuration of {spec.path!r}",
    )


def read_tokenizer(spec: ModelSpec, field: str = "model.path") -> Any:
    """The tokenizer of a model, which `field` of the spec names. Raises InputError."""
    from transformers import AutoTokenizer

    name, field = (spec.tokenizer, "model.tokenizer") if spec.tokenizer else (spec.path, field)
    return _loaded(
        lambda: AutoTokenizer.from_pretrained(name, trust_remote_code=spec.trust_remote_code),
        field,
        f"the tokenizer of {name!r}",
    )


def _loaded(load: Callable[[], T], field: str, thing: str) -> T:
    """What `load` returns. Raises InputError with the first line of the error that it raises."""
    try:
        return load()
    except Exception as error:  # transformers raises many kinds of error, including network errors
        hint = "check the name, the files and, for a hub name, the network and your login"
        if "trust_remote_code" in str(error):
            hint = "it needs its own code: set model.trust_remote_code: true if you trust its author"
        raise _error(field, f"cannot read {thing}: {class_and_line(error)}", hint) from error


def _shape(spec: ModelSpec, config: Any) -> ModelShape | None:
    try:
        return ModelShape.of_config({**config.get_text_config().to_dict(), "dtype": spec.dtype})
    except UnknownShape:
        return None


def _tokenizer_info(spec: ModelSpec, tokenizer: Any, rows: int | None) -> tuple[TokenizerInfo, tuple[str, ...]]:
    """`rows`: of the model's embedding. Raises InputError if the tokenizer is empty, or no token can end a response."""
    path, field = (spec.tokenizer, "model.tokenizer") if spec.tokenizer else (spec.path, "model.path")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        what = f"{path!r} has no tokenizer: what transformers makes of it has special tokens only"
        raise _error(field, what, "add tokenizer.json and tokenizer_config.json from where the model came from")
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if eos is None:
        what = f"the tokenizer of {path!r} has no end-of-sequence token, so no response could end by itself"
        raise _error(field, what, "set `eos_token` in its tokenizer_config.json")
    tokens, missing = len(tokenizer), ""
    warnings: tuple[str, ...] = ()
    if pad is None:
        missing = "the tokenizer has no padding token"
    elif rows is not None and pad == rows == tokens - 1:  # added without a row for it, as many tools do
        missing = f"the tokenizer's padding token {tokenizer.pad_token!r} is beyond the model's vocabulary"
        tokens = rows
    if missing:
        pad = eos
        warnings = (
            f"{field}: {missing}; its end-of-sequence token {tokenizer.eos_token!r} "
            "pads instead (padding is masked, so nothing is learned from it)",
        )
    return TokenizerInfo(path, tokens, eos, pad, tuple(special_tokens(tokenizer).values())), warnings


def special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Return special and added tokens (such as `<think>`) by id, without added white space."""
    added = {int(token): str(text) for token, text in tokenizer.added_tokens_decoder.items()}
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return {token: text for token, text in {**added, **named}.items() if text.strip()}


def _kind_problems(spec: ModelSpec, config: Any) -> list[Problem]:
    """Require a decoder with a language-model head."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    heads = ", ".join(getattr(config, "architectures", None) or []) or config.model_type
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or spec.trust_remote_code
    wrong_head = heads.endswith(("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"))
    if config.is_encoder_decoder or wrong_head or not known:
        what = f"{spec.path!r} is not a causal language model ({heads})"
        return [Problem("model.path", what, "name a decoder-only model, whose architecture ends in ForCausalLM")]
    return []


def _vocabulary_problems(info: TokenizerInfo, rows: int | None) -> list[Problem]:
    if rows is None or info.vocabulary_tokens <= rows:
        return []
    what = f"{info.path!r} has {info.vocabulary_tokens} tokens, but the model's vocabulary has {rows}"
    return [Problem("model.tokenizer", what, "use the tokenizer that the model was trained with")]


def _error(field: str, what: str, hint: str) -> InputError:
    return InputError("model", [Problem(field, what, hint)])


# -- the critic


KEY = "critic.model"


def critic_problems(spec: RunSpec, policy: PolicyModel) -> list[Problem]:
    """Check the model that a critic, or a reward model in training, starts from: its head, tokens and weights."""
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
    """Require a sequence classifier of transformers with one label."""
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
    """Require the policy's vocabulary: a critic reads tokens, not text."""
    theirs, ours = read_tokenizer(source, KEY).get_vocab(), policy.tokenizer.get_vocab()
    if theirs == ours:
        return []
    differs = next((token for token in ours if theirs.get(token) != ours[token]), None)
    what = f"{source.path!r} reads other tokens than the policy ({differs or 'it has more'!r} is the first)"
    return [Problem(KEY, what, "name a model with the policy's tokenizer, or leave it out to start from the policy")]


def attention_warnings(spec: RunSpec, longest: int) -> list[str]:
    """Say what eager attention takes for a micro-batch of sequences of `longest` tokens, where a model has it or may
    have it."""
    config = read_config(spec.model).get_text_config()
    form, reason = attention_form(config.to_dict())
    if form == "fused":
        return []
    layer = 4 * config.num_attention_heads * longest * max(longest, spec.learner.pass_tokens)
    what = "is trained" if form == "eager" else "may be trained (decided at load)"
    return [
        f"model.path: {spec.model.path!r} {what} with transformers' eager attention, because {reason}. Its scores take "
        f"{layer / GIB:.3g} GiB in each layer for learner.micro_batch_tokens of {spec.learner.pass_tokens} and "
        f"sequences of {longest} tokens, which the memory plan counts; lower learner.micro_batch_tokens or shorten the "
        "sequences to save memory"
    ]
