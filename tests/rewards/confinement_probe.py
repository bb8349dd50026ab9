"""Runs code that looks for secrets in confined processes, once per set of measures, and prints what it found as JSON.

    python confinement_probe.py <home> <other files, separated by :> <measures as JSON, by name>

This process and the shell that starts it have MARKER in their environment; so have the files that are named.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rlhfless.rewards.confinement import CodeTask, Measures, protection_with, run_confined
from rlhfless.spec import CodeSpec
from rlhfless.util import processes

MARKER = "MARKER-5f0c"

HUNT = f"""
import os
found = []

def look(path):
    try:
        with open(path, "rb") as stream:
            if b"{MARKER}" in stream.read(2**20):
                found.append(path)
    except OSError:
        pass

def walk(path):
    try:
        names = os.listdir(path)
    except OSError:
        return
    for name in names:
        look(os.path.join(path, name))
        walk(os.path.join(path, name))

for pid in PIDS:
    look(f"/proc/{{pid}}/environ")
    try:
        with open(f"/proc/{{pid}}/mem", "r+b"):
            found.append(f"/proc/{{pid}}/mem")
    except OSError:
        pass
for name in [*FILES, "/root/.ray/auth_token"]:
    look(name)
walk(HOME)
for name in FILES:
    for change in (lambda: os.chmod(name, 0o777), lambda: open(name, "a"), lambda: os.truncate(name, 0)):
        try:
            change()
            found.append("changed " + name)
        except OSError:
            pass
for pid in PIDS:
    try:
        os.kill(pid, 0)
        found.append(f"kill {{pid}}")
    except OSError:
        pass
for folder in (HOME, "/tmp", "/dev/shm", "/var/tmp"):
    try:
        open(folder + "/rlhfless-left", "w")
        os.remove(folder + "/rlhfless-left")
        found.append("wrote to " + folder)
    except OSError:
        pass
import ctypes.util, encodings.idna, numpy.linalg  # Python's own and packages, imported late
open("own", "w").close()
print(*found, "the end", sep="\\n")
"""


def ancestors() -> list[int]:
    """This process, its parent, and so on."""
    pids = [os.getpid()]
    while pids[-1] > 1:
        stat = Path(f"/proc/{pids[-1]}/stat").read_text()
        pids.append(int(stat.rpartition(")")[2].split()[1]))
    return pids[:-1]


def main() -> None:
    home, files, measures = sys.argv[1], sys.argv[2].split(":"), json.loads(sys.argv[3])
    processes.hide_from_others()
    pids = ancestors()
    known = f"PIDS, FILES, HOME = {pids}, {files}, {home!r}\n"
    answer = {"uid": os.getuid(), "pids": pids, "results": {}}
    for name, flags in measures.items():
        for file in map(Path, files):  # what ran before may have changed them
            file.write_text(MARKER)
            file.chmod(0o644 if file.suffix == ".jsonl" else 0o600)
        spec = CodeSpec(type="code", cpu_s=20, timeout_s=60)
        ended = run_confined(CodeTask(known + HUNT), spec, Measures(**flags))
        held = asdict(protection_with(Measures(**flags)))
        answer["results"][name] = {"held": held, "output": ended.output, "cause": ended.cause}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
