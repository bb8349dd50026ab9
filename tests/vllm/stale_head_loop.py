"""The real engine with our repair of tied heads taken out."""

from rlhfless.functions.generation.vllm import loop

if __name__ == "__main__":
    start = loop._start

    def start_without_repair(settings):  # type: ignore[no-untyped-def]
        started = start(settings)
        from rlhfless.functions.generation.vllm import weight_engine

        weight_engine.repack_shared_weights = lambda model: None
        return started

    loop._start = start_without_repair
    loop.main()
