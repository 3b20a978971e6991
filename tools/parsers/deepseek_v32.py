"""DeepSeek V3.2 (``<｜DSML｜function_calls>``) and V4 (``<｜DSML｜tool_calls>``): calls as in `invoke`.

Each parameter says its type.
"""

from __future__ import annotations

from penstock.tools.parsers.invoke import InvokeParser, InvokeSyntax

PREFIX = "｜DSML｜"


class DeepSeekV32Parser(InvokeParser):
    def __init__(self) -> None:
        super().__init__(InvokeSyntax(f"{PREFIX}function_calls", PREFIX, says_type=True))


class DeepSeekV4Parser(InvokeParser):
    def __init__(self) -> None:
        super().__init__(InvokeSyntax(f"{PREFIX}tool_calls", PREFIX, says_type=True))
