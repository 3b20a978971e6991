"""MiniMax M2, M2.1 and M2.5: ``<minimax:tool_call>`` around calls as in `invoke`, types by the schema."""

from __future__ import annotations

from penstock.tools.parsers.invoke import InvokeParser, InvokeSyntax


class MiniMaxM2Parser(InvokeParser):
    def __init__(self) -> None:
        super().__init__(InvokeSyntax("minimax:tool_call"))
