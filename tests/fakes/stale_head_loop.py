"""The real engine with our fix of tied heads disabled in every computing process."""

from rlhfless.functions.generation.vllm import loop
from rlhfless.util import processes


def take_out_repair() -> None:
    """Disable the fix in this process. Imports vLLM."""
    from rlhfless.functions.generation.vllm import weight_engine

    weight_engine.repack_shared_weights = lambda model: None


if __name__ == "__main__":
    start = loop._start

    def start_without_repair(settings):  # type: ignore[no-untyped-def]
        started = start(settings)
        take_out_repair()
        return started

    loop._start = start_without_repair
    loop.main()
elif __name__ == "__mp_main__":
    processes.die_with_spawner()
    take_out_repair()
