"""The tool that the agent may call. Any typed function is one; what it says here is what the model reads."""

from penstock.datasets import evaluate
from penstock.tools import function_tool


@function_tool(name="python")  # the name that the small model knows; yours may have any
def calculate(code: str) -> str:
    """Run Python code. Variables persist between calls."""
    # The small model knows this description, and of Python only `print(round(EXPRESSION,4))`: nothing is executed here.
    expression = code.strip().removeprefix("print(round(").removesuffix(",4))")
    return f"{round(evaluate(expression), 4)}"  # raises ValueError for anything else: the model reads why
