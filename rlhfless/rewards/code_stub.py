"""Programs from responses that complete a prompt, as in HumanEval: the prompt has imports and the function's head."""

from __future__ import annotations

import re
import textwrap

from rlhfless.rewards.code_blocks import program_of

_CODE = re.compile(r"^[ \t]*(?:import |from \S+ import |def |async def |class )", re.MULTILINE)


def programs_of(program: str, function: str, stub: str) -> tuple[str, ...]:
    """The texts to run, of which the first that compiles is the program.

    A program that defines the function gets what stands in the stub before it (imports, helpers); another is taken as
    the function's body.
    """
    program = textwrap.dedent(program).strip("\n")
    name = function.replace("()", "").rpartition(".")[2]
    if "```" in stub or "~~~" in stub:
        stub = program_of(stub) or ""
    if not name or not _CODE.search(stub):
        return (program,)
    head = _definition(name).search(stub)
    if _definition(name).search(program) or re.search(rf"^{name}[ \t]*(?::[^=\n]*)?=[^=]", program, re.MULTILINE):
        return (f"{stub[: head.start()] if head else stub}\n{program}", program)
    if head is None:
        return (f"{stub}\n{program}", program)
    start = f"{stub.rstrip()}\n"
    indentation = _indentation(start)
    # In the second the first line alone has lost its indentation.
    return (start + textwrap.indent(program, indentation), start + indentation + program.lstrip(), program)


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", re.MULTILINE)


def _indentation(stub: str) -> str:
    """Of the last line of a stub; of its body, where that is the function's head."""
    last = next((line for line in reversed(stub.split("\n")) if line.strip()), "")
    own = last[: len(last) - len(last.lstrip())]
    return own + "    " if last.rstrip().endswith(":") else own or "    "
