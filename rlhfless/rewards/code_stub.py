"""Programs from responses that complete a prompt, as in HumanEval: the prompt has imports and the function's head."""

from __future__ import annotations

import re
import textwrap

from rlhfless.rewards.code_blocks import definition_of, program_of

_CODE = re.compile(r"^[ \t]*(?:import |from \S+ import |def |async def |class )", re.MULTILINE)

_FUTURE = re.compile(r"^from __future__ import [^(\n]*\n", re.MULTILINE)


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
    head = definition_of(name).search(stub)
    if definition_of(name).search(program):
        start = stub[: head.start()] if head else stub
        future = "".join(_FUTURE.findall(program))  # it must be the first statement
        return (f"{future}{start}\n{_FUTURE.sub('', program)}", program)
    if head is None:
        return (f"{stub}\n{program}", program)
    start = f"{stub.rstrip()}\n"
    indentation = _indentation(start)
    # In the second the first line alone has lost its indentation.
    return (start + textwrap.indent(program, indentation), start + indentation + program.lstrip(), program)


def _indentation(stub: str) -> str:
    """Of the last line of a stub; of its body, where that is the function's head."""
    last = next((line for line in reversed(stub.split("\n")) if line.strip()), "")
    own = last[: len(last) - len(last.lstrip())]
    return own + "    " if last.rstrip().endswith(":") else own or "    "
