"""Calls as JSON behind a mark, without more syntax; models differ in the marks, and in a list or single objects.

hermes           <tool_call>{...}</tool_call>     several times                       Hermes, Qwen 2.5 and 3, Granite 4
granite          <|tool_call|>[{"name": "python", "arguments": {"code": "1 + 1"}}, ...]       Granite 3
phi4_mini        functools[{...}, ...]            the template leaves the mark out of old calls
nemotron         <TOOLCALL>[{...}, ...]</TOOLCALL>                            Nemotron Nano 2 and Super 1.5
hunyuan_a13b     <tool_calls>[{...}, ...]</tool_calls>                        Hunyuan A13B, Apriel (with an `id`)
                 <tool_calls>{...}\\n{...}\\n</tool_calls>                    MiniMax M1
granite_20b_fc   <function_call> {...}            several times               Granite 20B (function calling)
gigachat3        <|function_call|>{...}           several times               GigaChat 3.1
internlm2        <|action_start|><|plugin|>\\n{...}<|action_end|>             InternLM2 and 2.5
"""

from __future__ import annotations

from typing import Any, ClassVar

from penstock.tools.parsers.json_call import add_call, arguments_key, id_of, named_calls, read_call_list, read_json
from penstock.tools.parsers.turn import MarkedParser, Tools, TurnBuilder, expect, skip_space

CALL = '{"name": ..., "arguments": {...}}'


class JsonListParser(MarkedParser):
    """A list of calls between two marks; without `closing` the list itself is the end."""

    def __init__(self) -> None:
        self.shape = f"calls are written {self.opening}[{CALL}, ...]{self.closing}"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        calls, end = read_call_list(text, body)
        end = expect(text, end, self.closing) if self.closing else end
        turn.add_named(calls)
        return end


class GraniteParser(JsonListParser):
    opening = "<|tool_call|>"


class NemotronParser(JsonListParser):
    opening, closing = "<TOOLCALL>", "</TOOLCALL>"


class Phi4MiniParser(JsonListParser):
    """The mark's own bracket begins the list."""

    opening = "functools["

    def __init__(self) -> None:
        self.shape = f"calls are written {self.opening}{CALL}, ...]"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        return super().read(text, body - 1, turn, tools)


class HunyuanA13bParser(JsonListParser):
    """Reads objects one after the other too, as MiniMax M1 writes them."""

    opening, closing = "<tool_calls>", "</tool_calls>"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        values: list[Any] = []
        end = body
        while text.startswith("{", skip_space(text, end)):
            value, end = read_json(text, end)
            values.append(value)
        if not values:
            values, end = read_json(text, body)
        calls = named_calls(values, also=("id",))
        end = expect(text, end, self.closing)
        for (name, arguments), value in zip(calls, values, strict=True):
            turn.call(name, arguments, id_of(value))
        return end


class JsonCallParser(MarkedParser):
    """One object behind each mark; without `closing` nothing ends it."""

    between: ClassVar[str] = ""
    """Stands between the mark and the object."""

    def __init__(self) -> None:
        self.shape = f"a call is written {self.opening}{self.between}{CALL}{self.closing}"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        value, end = read_json(text, body)
        end = expect(text, end, self.closing) if self.closing else end
        add_call(turn, value)
        return end


class HermesParser(JsonCallParser):
    opening, closing, resumes = "<tool_call>", "</tool_call>", True


class Granite20bFcParser(JsonCallParser):
    opening, between = "<function_call>", " "


class GigaChat3Parser(JsonCallParser):
    opening = "<|function_call|>"


class InternLm2Parser(MarkedParser):
    """Models write ``parameters`` for ``arguments`` too. ``<|interpreter|>`` is another kind of action: malformed."""

    opening, closing = "<|action_start|>", "<|action_end|>"
    shape = f"a call is written {opening}<|plugin|>{CALL}{closing}"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        value, end = read_json(text, expect(text, body, "<|plugin|>"))
        end = expect(text, end, self.closing)
        add_call(turn, value, arguments_key(value, "arguments", "parameters"))
        return end
