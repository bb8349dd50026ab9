"""Rewards from outside the scoring workers: an HTTP endpoint, or a reward model on a replica of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlhfless.spec.base import MOST_TOKENS, Duration, Processes, Tokens, without_user
from rlhfless.spec.data import DType
from rlhfless.spec.scoring import RewardPart

MOST_PORT = 65_535


class HttpSpec(RewardPart):
    """Numbers from an HTTP endpoint. docs/rewards.md has the protocol."""

    type: Literal["http"]
    url: Annotated[str, Field(pattern=r"^https?://")]
    """Samples are POSTed here as JSON. Without a user or a password."""
    token_env: str | None = None
    """Environment variable of the scoring replica that holds the bearer token to send."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Samples per request."""
    concurrency: Processes = 8
    """Requests in flight at a time."""
    timeout_s: Duration = 30.0
    """Longest time one request may take."""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """Further attempts if there is no connection, no answer in time, or status 408, 429 or 5xx; after 0.5, 1, 2, ...
    s."""

    @field_validator("url")
    @classmethod
    def _has_a_host_and_no_password(cls, url: str) -> str:
        import httpx  # not needed for specs without such a reward

        without_user(url, "send a token instead: name its environment variable as `token_env`")
        try:
            host, port = httpx.URL(url).host, httpx.URL(url).port
            host.encode("idna")  # as it is looked up
        except (httpx.InvalidURL, ValueError) as error:
            raise ValueError(f"not a URL: {error}") from error
        if not host:
            raise ValueError("not a URL: it names no host")
        if port is not None and port > MOST_PORT:
            raise ValueError(f"not a URL: its port {port} is above {MOST_PORT}")
        return url


class RewardModelSpec(RewardPart):
    """The score of a sequence-classification model with one label, on a replica of its own."""

    type: Literal["reward_model"]
    path: str
    """Folder or hub name, in Hugging Face format, with its tokenizer."""
    dtype: DType = "bfloat16"
    """Number format of weights and products. bfloat16, as reward models are published; float32 is exact but slower."""
    chat_template: bool = False
    """Score the conversation as the reward model's own template renders it, rather than prompt + response."""
    prompt_field: str | None = None
    """Column with the prompt for this model, as text or chat messages. When left out it is the prompt as the
    policy saw it; a policy with a chat template of its own keeps the raw prompt under `prompts.prompt_field`."""
    max_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 4096
    """Longer sequences lose tokens at their beginning, so that the end of the response is always scored."""
    micro_batch_tokens: Tokens = 8192
    """Padded tokens per forward pass; bounds the memory."""
    trust_remote_code: bool = False
    """Run model code that comes with the path."""
