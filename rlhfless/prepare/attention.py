"""Whether a run's model will be computed with its own attention, which takes memory that grows with the square of a
sequence's length."""

from __future__ import annotations

from rlhfless.prepare.model import read_config
from rlhfless.scaling.memory import GIB
from rlhfless.spec import RunSpec


def attention_warnings(spec: RunSpec, longest: int) -> list[str]:
    """What `eager` attention takes for a micro-batch of sequences of `longest` tokens, beyond the memory plan."""
    # Here: it imports torch, which takes long, and a fault found earlier should not wait for that.
    from rlhfless.functions.attention_form import eager_reason

    config = read_config(spec.model)
    reason = eager_reason(config)
    if not reason:
        return []
    heads = config.get_text_config().num_attention_heads
    layer = 4 * heads * longest * max(longest, spec.learner.pass_tokens)
    return [
        f"model.path: {spec.model.path!r} is trained with transformers' eager attention, because {reason}. Its scores "
        f"take {layer / GIB:.3g} GiB in each layer for learner.micro_batch_tokens of {spec.learner.pass_tokens} "
        f"and sequences of {longest} tokens, which the memory plan does not count; if the learner runs out of memory, "
        "lower learner.micro_batch_tokens or shorten the sequences"
    ]
