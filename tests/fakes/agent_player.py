"""A game of three turns as a program: an unmodified client of OpenAI's API, with a tool whose calls it notes.

python agent_player.py <id of the row> <log>
"""

import json
import os
import random
import sys
import time

from openai import OpenAI

TURNS = 3


def main(name: str, log: str) -> None:
    with open(os.environ["RLHFLESS_TASK"]) as stream:
        seed = json.load(stream)["seed"]
    client, numbers, said = OpenAI(), random.Random(seed), 0
    messages = [{"role": "user", "content": f"{numbers.randrange(10)} :"}]
    for turn in range(TURNS):
        text = client.chat.completions.create(model="any", messages=messages).choices[0].message.content
        said += len(text.split()) % 7
        with open(log, "a") as calls:
            calls.write(f"{name}/{seed}/{turn}\n")
        time.sleep(0.1)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{numbers.randrange(10)} :"}]
    print(json.dumps({"reward": said}))


if __name__ == "__main__":
    main(*sys.argv[1:])
