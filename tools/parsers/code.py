"""Code blocks as calls, for agents that act by writing code: ```` ```python ```` is a call of `python`.

A block ends at a line of as many backticks as it began with, or more. Blocks in other languages are content, and so is
everything up to a ``</think>``: what a model tries out in thought it does not ask for. Code that spells out that mark
cannot be called.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import unusable
from penstock.tools.parsers.turn import THOUGHT, Tools, TurnBuilder, read_each

TOOLS = {
    "python": ("python", "code"),
    "py": ("python", "code"),
    "bash": ("shell", "command"),
    "sh": ("shell", "command"),
    "shell": ("shell", "command"),
}
"""Language → (tool, its argument)."""
SHAPE = "code is written between a line ```python and a line ```"
_FENCE = re.compile(r"^ {0,3}(`{3,64})(?!`)[ \t]*([^\s`]*)[^\n`]*$\n?", re.MULTILINE)


class CodeParser:
    opening, closing = "", ""

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        thought = text.find(THOUGHT)
        return read_each(text, _FENCE, SHAPE, _read_block, thought + len(THOUGHT) if thought >= 0 else 0)


def _read_block(text: str, fence: re.Match[str], turn: TurnBuilder) -> int:
    closing = re.compile(rf"^ {{0,3}}{fence[1]}`*[ \t]*$", re.MULTILINE).search(text, fence.end())
    end = closing.end() if closing else len(text)
    if fence[2].lower() not in TOOLS:
        turn.say(text[fence.start() : end])
        return end
    name, argument = TOOLS[fence[2].lower()]
    code = text[fence.end() : closing.start() if closing else end].removesuffix("\n")
    if closing is None:
        turn.malformed("the block is not closed", name)
    elif problem := unusable(code) if code.strip() else "the block is empty":
        turn.malformed(problem, name)
    else:
        turn.call(name, {argument: code})
    return end
