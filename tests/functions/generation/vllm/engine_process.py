"""Starts an engine with a separate core process, prints its process ids and the outcome of a load, and waits to be
killed.

    engine_process.py FOLDER LOCATION
"""

import asyncio
import dataclasses
import sys
from pathlib import Path

from transformers import Qwen2ForCausalLM

from fakes.tiny_models import TinyModel, start_tiny_engine
from rlhfless.weights.store import FolderStore


async def main(folder: Path, location: str) -> None:
    model = TinyModel(folder / "model", Qwen2ForCausalLM.from_pretrained(folder / "model"))
    engine = await start_tiny_engine(model, folder / "store", "core apart")
    print(*engine.pids, flush=True)
    published = model.publish(FolderStore(folder / "store").put("run", 1, 2, model.tensors()))
    try:
        await engine.load(dataclasses.replace(published, location=location))
    except Exception as error:
        print(type(error).__name__, str(error).replace("\n", " "), flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
