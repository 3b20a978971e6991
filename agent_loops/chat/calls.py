"""Which parser reads the calls that a chat template writes: proven by the template itself, or the tools are refused.

    agent.parser: auto     the only one that reads them           several or none: `NoParser`, which refuses tools
    agent.parser: NAME     checked by `check_calls_are_read`      code: no template writes it, so its name is trusted

A template that writes calls is asked to write one. One that writes none must show the model the mark that every call
begins with, in the prompt that shows the tools: nothing else says how the model will write them.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import get_args

from penstock.agent_loops.chat.template import ChatTemplate, Tools
from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ParsedTurn, ParserName, ToolCall, ToolCallParser, get_parser

AUTO = "auto"
USER = {"role": "user", "content": "What is 2+2?"}
PARAMETERS = {"type": "object", "properties": {"probe": {"type": "string", "description": "Where to look."}}}
PROBE = {"type": "function", "function": {"name": "probe", "description": "Looks.", "parameters": PARAMETERS}}
ARGUMENTS = {"probe": "1 < 2"}
log = logging.getLogger(__name__)


class NoParser:
    """Stands in for a parser that could not be chosen. It reads no calls, so no tools may be shown to the model."""

    opening = closing = ""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        return ParsedTurn(text.strip())


def choose_parser(name: str, template: ChatTemplate) -> ToolCallParser:
    """The parser of that name, or under `AUTO` the only one that reads the template's calls, else `NoParser`.

    Raises `ValueError` for an unknown name.
    """
    if name != AUTO:
        return get_parser(name)
    fits = readers_of(template, [PROBE])
    if len(fits) != 1:
        return NoParser(_unread(AUTO, template, [PROBE]))
    log.info("agent.parser: auto: %s, the only one that reads the calls of the model's chat template", fits[0])
    return get_parser(fits[0])


def check_calls_are_read(parser: ToolCallParser, template: ChatTemplate, tools: Tools) -> None:
    """Raises `TemplateError`, which names the parsers that would do."""
    if isinstance(parser, NoParser):
        raise TemplateError(parser.problem)
    name = name_of(parser)
    if name == "code":
        return
    text = _written(template, tools)
    if text is None:
        proven = _is_shown(parser, template, tools)
    else:
        shown_parser = _asked_for(template, tools)
        proven = name == shown_parser if shown_parser else _reads(parser, text, tools)
    if not proven:
        raise TemplateError(_unread(name, template, tools))


def readers_of(template: ChatTemplate, tools: Tools) -> list[str]:
    """Names of the parsers that the template proves.

    Of those that read its calls, those that leave least of a call as text: a line of JSON inside `<tool_call>` is read
    by two. `_asked_for` comes before those.
    """
    text = _written(template, tools)
    if text is None:
        return [name for name, parser in _parsers().items() if _is_shown(parser, template, tools)]
    rests = {name: len(one.parse(text).content) for name, one in _parsers().items() if _reads(one, text, tools)}
    shown_parser = _asked_for(template, tools)
    return [shown_parser] if shown_parser else [name for name, length in rests.items() if length == min(rests.values())]


def _asked_for(template: ChatTemplate, tools: Tools) -> str:
    """The only parser whose mark the prompt shows, where the template writes old calls without any mark; else empty.

    Phi-4-mini's prompt asks for ``functools[``, which its template leaves out of old calls.
    """
    text, parsers = _written(template, tools), _parsers()
    if text is None or any(one.opening and one.opening in text for one in parsers.values()):
        return ""
    if not any(_reads(one, text, tools) for one in parsers.values()):
        return ""
    names = [name for name, one in parsers.items() if _is_shown(one, template, tools)]
    return names[0] if len(names) == 1 else ""


def name_of(parser: ToolCallParser) -> str:
    """Returns the parser's name in `agent.parser`."""
    return next((name for name, one in _parsers().items() if type(one) is type(parser)), type(parser).__name__)


@lru_cache(maxsize=1)
def _parsers() -> dict[str, ToolCallParser]:
    return {name: get_parser(name) for name in get_args(ParserName)}


def _unread(name: str, template: ChatTemplate, tools: Tools) -> str:
    text, fits, known = _written(template, tools), readers_of(template, tools), ", ".join(get_args(ParserName))
    if text is None:
        cause = f"agent.parser={name} is not proven: the chat template writes no tool calls, and shows the model"
        if fits:
            return (
                f"{cause} a mark that calls of {', '.join(fits)} begin with: set agent.parser to the one that it writes"
            )
        return (
            f"{cause} no mark of any parser ({known}): give it a template that writes `tool_calls`, or set"
            " agent.parser=code for a model that is prompted to act by blocks of code"
        )
    if len(fits) > 1:
        fix = f"set agent.parser to one of {', '.join(fits)}, which read them"
    else:
        fix = f"set agent.parser={fits[0]}, which reads them" if fits else f"no parser of {known} does"
    return f"agent.parser={name} does not read this model's calls: {fix}; the template writes {text!r}"


def _written(template: ChatTemplate, tools: Tools) -> str | None:
    return template.reply_with_call(tools, _call(tools))


def _reads(parser: ToolCallParser, text: str, tools: Tools) -> bool:
    """The id as well, if the template writes it into the call: a result refers to the id that the model wrote."""
    call, calls = _call(tools), parser.parse(text).calls
    if [(one.name, one.arguments) for one in calls] != [(call.name, call.arguments)]:
        return False
    return call.call_id not in text or calls[0].written_id == call.call_id


def _is_shown(parser: ToolCallParser, template: ChatTemplate, tools: Tools) -> bool:
    return bool(parser.opening) and parser.opening in template.render([USER], tools, prompt=True)


def _call(tools: Tools) -> ToolCall:
    return ToolCall(tools[0]["function"]["name"], ARGUMENTS, "written00")
