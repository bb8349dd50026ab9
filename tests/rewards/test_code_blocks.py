"""Which part of a response is its program."""

import time

import pytest

from rlhfless.rewards.code import program_of

PROGRAM = "print(1)\n"
F = "```"

SHAPES = {
    "after cpp": f"{F}cpp\nint main() {{}}\n{F}\n{F}python\n{PROGRAM}{F}\n",
    "before cpp": f"{F}python\n{PROGRAM}{F}\nIn C++:\n{F}cpp\nint main() {{}}\n{F}",
    "before json": f"{F}python\n{PROGRAM}{F}\nIt prints\n{F}json\n{{}}\n{F}",
    "after bash": f"Run it:\n{F}bash\npython a.py\n{F}\n{F}python\n{PROGRAM}{F}",
    "any case": f"{F}Python\n{PROGRAM}{F}",
    "upper case with a version": f"{F}PYTHON3\n{PROGRAM}{F}",
    "py": f"{F}py\n{PROGRAM}{F}",
    "space before the tag": f"{F} python\n{PROGRAM}{F}",
    "attributes": f'{F}python title="a.py" {{1,2}}\n{PROGRAM}{F}',
    "class in braces": f"~~~ {{.numberLines .python}}\n{PROGRAM}~~~",
    "file name": f"{F}python:main.py\n{PROGRAM}{F}",
    "CRLF": f"{F}python\r\nprint(1)\r\n{F}\r\n",
    "tildes": f"~~~python\n{PROGRAM}~~~\n",
    "long fence": f"`````python\n{PROGRAM}`````",
    "indented": f"    {F}python\n    print(1)\n    {F}",
    "indented by a tab": f"\t{F}python\n\tprint(1)\n\t{F}",
    "content indented more": f"{F}python\n    print(1)\n{F}",
    "in a list": f"1. First:\n\n   {F}python\n   print(1)\n   {F}\n2. Done",
    "in a list of a list": f"- a\n  - b\n    {F}py\n    print(1)\n    {F}\n",
    "in a list item's first line": f"1. {F}python\nprint(1)\n{F}\n",
    "in a quote": f"> {F}python\n> print(1)\n> {F}\n",
    "cut off": f"So:\n{F}python\n{PROGRAM}",
    "last of several": f"{F}python\nprint(2)\n{F}\nor rather\n{F}python\n{PROGRAM}{F}",
    "an empty block at the end": f"{F}python\n{PROGRAM}{F}\nand\n{F}python\n",
    "last untagged": f"{F}\nprint(2)\n{F}\n{F}\n{PROGRAM}{F}\n{F}bash\nls\n{F}",
    "tagged before untagged": f"{F}python\n{PROGRAM}{F}\nprints\n{F}\n1\n{F}",
    "a session after it": f"{F}python\n{PROGRAM}{F}\n{F}python\n>>> f(1)\n2\n{F}\n{F}pycon\n>>> 1\n{F}",
    "thoughts with a block": f"<think>\n{F}python\nprint(2)\n{F}\n</think>\n{F}\n{PROGRAM}{F}",
    "thoughts with an open block": f"<think>\n{F}python\nprint(2)\n</think>\n{F}python\n{PROGRAM}{F}",
    "answer tags": f"<think>{F}</think>\n<answer>\n{F}python\n{PROGRAM}{F}\n</answer>",
    "a block after the answer": f"<answer>\n{F}python\n{PROGRAM}{F}\n</answer>\nUse:\n{F}python\nf(1)\n{F}",
    "answer tags without a block": f"<think>\n{F}python\nprint(2)\n{F}\n</think>\n<answer>print(1)\n</answer>",
    "after text": f"Solution: {F}python\n{PROGRAM}{F}\nok",
    "closed after code": f"{F}python\nprint(1){F}\nok",
    "closed after code, then another": f"{F}python\nprint(2){F}\nor\n{F}python\n{PROGRAM}{F}",
    "never closed before the next": f"{F}python\nprint(2)\n{F}python\n{PROGRAM}{F}",
    "in a block of markdown": f"{F}markdown\n# Solution\n{F}python\n{PROGRAM}{F}\n{F}",
    "after an open string": f'{F}python\nx = """\n{F}\nnow\n{F}python\n{PROGRAM}{F}',
    "tag on the next line": f"{F}\npython\n{PROGRAM}{F}",
    "byte order mark": f"\ufeff{F}python\n\ufeff{PROGRAM}{F}",
    "no-break space after the tag": f"{F}python\u00a0\n{PROGRAM}{F}",
    "before a block of text": f"{F}py\n{PROGRAM}{F}\n{F}text\n1\n{F}\n{F}\n1\n{F}",
    "inline code before it": f"Use `a` and {F} `b` {F}.\n{F}python\n{PROGRAM}{F}",
    "below HTML": f"<!-- a -->\n<pre>\n{F}python\n{PROGRAM}{F}\n</pre>",
    "MyST": f"{F}{{code-block}} python\n{PROGRAM}{F}",
    "longer tag": f"{F}python_code\n{PROGRAM}{F}\n{F}python-console\n>>> 1\n{F}",
    "version": f"{F}Python3.11\n{PROGRAM}{F}",
    "open in an answer": f"<answer>\n{F}python\n{PROGRAM}</answer>\n",
    "no block after an open block of a thought": f"<think>\n{F}python\n2\n</think>\n{PROGRAM}",
    "after an open block of a thought in C++": f"<think>\n{F}cpp\n2\n</think>\n{F}\n{PROGRAM}{F}",
    "in HTML": f"<details>\n<summary>Code</summary>\n\n{F}python\n{PROGRAM}{F}\n</details>",
    "below a table and a rule": f"| a |\n|---|\n| 1 |\n{F}python\n{PROGRAM}{F}\n---\n",
    "no block": PROGRAM,
    "no block after thoughts": f"<think>hm</think>\n{PROGRAM}",
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_program_is_found(name):
    assert program_of(SHAPES[name]).strip("\n") == "print(1)"


@pytest.mark.parametrize(
    "program",
    [
        's = """\n```\nhi\n```\n"""\nprint(1)\n',
        "s = '''\n    ```python\n    x\n    ```\n'''\nprint(1)\n",
        's = """\n~~~\n"""\nprint("```")  # ```\n',
        'def f():\n    r"""Use \\""" and\n\n    ```\n    f()\n    ```\n    """\n    return "it\'s"\n',
    ],
)
@pytest.mark.parametrize(
    "around",
    ["a\n```python\n{}```\nb", "~~~python\n{}~~~", "```\n{}```", "{}", "```python\n{}", "```cpp\nx\n```\n```py\n{}```"],
)
def test_a_fence_in_a_string_of_the_program_does_not_end_it(program, around):
    assert program_of(around.format(program)) == program


@pytest.mark.parametrize(
    "response",
    [
        "```cpp\nint x;\n```",
        "```c++\nint x;\n```\n```json\n{}\n```",
        "```pycon\n>>> 1\n1\n```",
        "```python\n```",
        "<think>\n```python\nprint(1)\n```\n</think>",
        " \n",
    ],
)
def test_a_response_may_have_no_program(response):
    assert program_of(response) is None


@pytest.mark.parametrize(
    "response",
    ["```python\n" * 5000, "```\n" * 5000, '"""\n```python\n' * 3000, "> " * 3000 + "x", "- " * 3000, "'''" * 9000],
)
def test_repetitive_responses_take_no_quadratic_time(response):
    began = time.process_time()
    program_of(response)
    assert time.process_time() - began < 30
