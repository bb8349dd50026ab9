"""rlhfless: an elastic, serverless-style runtime for RLHF of language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfless.client import AsyncClient, Client

__version__ = "0.2.0"

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """The clients are imported when they are asked for: every process of a run imports this module."""
    if name in ("AsyncClient", "Client"):
        from rlhfless import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
