"""An agent that knows nothing of training: a client of OpenAI's API that answers a question with a calculator.

python agent.py "What is 17 * 23?" 391
"""

import ast
import json
import operator
import sys

from openai import OpenAI

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an expression with + - * and whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("only + - * and whole numbers")


def main(question: str, answer: str) -> None:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [
        {"role": "system", "content": "Use the calculator, then say the number alone."},
        {"role": "user", "content": question},
    ]
    while True:
        turn = client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
        said = turn.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            try:
                expression = json.loads(call.function.arguments)["expression"]
                result = str(calculate(ast.parse(expression, mode="eval").body))
            except (ValueError, KeyError, TypeError, SyntaxError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(json.dumps({"reward": float((said.content or "").strip() == answer)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
