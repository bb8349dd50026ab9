"""The benchmarks that compare with bare engines, one after the other in one process, on the same bare engines.

    python tests/benchmarks/sharing.py

Each is called as by its command line, with `--smoke`. Only the engines are shared: to start one takes 40 s of a core.
One that is pinned stands for both of `step`, and they do not compile (another 48 s where nothing is cached).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import generation
import step
from bare import BareEngine, bare_engines
from setting import assets

PINNED, DEFAULT = (0,), None


def main() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with assets(prompts=1) as folder:
        model = str(folder / "model")  # the same in all of them: its seed is fixed
        with bare_engines(model, step.MAX_MODEL_LEN, PINNED, DEFAULT) as (pinned, default):

            @contextmanager
            def shared(_model: str, max_model_len: int, *cores: tuple[int, ...] | None) -> Iterator[list[BareEngine]]:
                assert max_model_len == step.MAX_MODEL_LEN
                yield [pinned if own else default for own in cores]

            for benchmark in (generation, step):
                benchmark.bare_engines = shared
                sys.argv = [str(benchmark.__file__), "--smoke"]
                print(f"== {benchmark.__name__}")
                benchmark.main()


if __name__ == "__main__":
    main()
