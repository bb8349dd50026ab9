"""One rank of the second policy; its process alone imports torch."""

from rlhfless.functions.per_token import PerTokenSettings
from rlhfless.functions.shares import FrozenPolicy
from rlhfless.spec import ModelSpec


class SecondPolicyWorker(FrozenPolicy):
    """Compute logprobs like the reference, with another model."""

    @staticmethod
    def model_of(settings: PerTokenSettings) -> ModelSpec:
        return settings.model.model_copy(update={"path": settings.own.path})
