"""The protocol of parsers, which find tool calls in what a model wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.common import Registry

ParserName = Literal[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "deepseek",
    "deepseek_v32",
    "deepseek_v4",
    "glm",
    "harmony",
    "gemma4",
    "minimax_m2",
    "lfm2",
    "pythonic",
    "xlam",
    "phi4_mini",
    "internlm2",
    "granite",
    "granite_20b_fc",
    "seed_oss",
    "kimi_k2",
    "kimi_k3",
    "cohere",
    "command_r",
    "apertus",
    "hunyuan_a13b",
    "hy_v3",
    "minicpm5",
    "nemotron",
    "functionary",
    "functionary_v3_2",
    "muse_glimmer",
    "gigachat3",
    "code",
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One parsed call. If `error` is set it must not be dispatched; the model reads the error instead."""

    name: str
    """Empty if it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""
    """``call_0``, ``call_1`` ...: position in the turn."""
    written_id: str = ""
    """The id that the model wrote, where results are written next to it (Kimi K2, Mistral); empty elsewhere. A number
    (Cohere) counts the calls of the conversation before it."""
    error: str | None = None
    """The fault in the call's form, in words for the model."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    content: str
    """Text that the model wrote around its calls, stripped."""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Called by agent loops with the decoded text of one model call (special tokens of the call syntax kept)."""

    @property
    def opening(self) -> str:
        """The mark that every call begins with, wherever it stands. Empty: a call can begin anywhere."""

    @property
    def closing(self) -> str:
        """The mark that every call ends with. Empty if there is none."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        """Never raises, whatever `text` is; malformed calls have `error` set. Time is linear in the text's length.

        `tools` are OpenAI function schemas. Syntaxes that write arguments as plain text read their types there, and
        guess without; the others do not look at them.
        """


PARSERS: Registry[Callable[[], ToolCallParser]] = Registry(
    "tool-call parser",
    {
        "hermes": "penstock.tools.parsers.json_lists:HermesParser",
        "qwen3_coder": "penstock.tools.parsers.qwen3_coder:Qwen3CoderParser",
        "llama3_json": "penstock.tools.parsers.llama3_json:Llama3JsonParser",
        "mistral": "penstock.tools.parsers.mistral:MistralParser",
        "deepseek": "penstock.tools.parsers.deepseek:DeepSeekParser",
        "deepseek_v32": "penstock.tools.parsers.invoke:DeepSeekV32Parser",
        "deepseek_v4": "penstock.tools.parsers.invoke:DeepSeekV4Parser",
        "glm": "penstock.tools.parsers.glm:GlmParser",
        "harmony": "penstock.tools.parsers.harmony:HarmonyParser",
        "gemma4": "penstock.tools.parsers.gemma4:Gemma4Parser",
        "minimax_m2": "penstock.tools.parsers.invoke:MiniMaxM2Parser",
        "lfm2": "penstock.tools.parsers.pythonic:Lfm2Parser",
        "pythonic": "penstock.tools.parsers.pythonic:PythonicParser",
        "xlam": "penstock.tools.parsers.xlam:XlamParser",
        "phi4_mini": "penstock.tools.parsers.json_lists:Phi4MiniParser",
        "internlm2": "penstock.tools.parsers.json_lists:InternLm2Parser",
        "granite": "penstock.tools.parsers.json_lists:GraniteParser",
        "granite_20b_fc": "penstock.tools.parsers.json_lists:Granite20bFcParser",
        "seed_oss": "penstock.tools.parsers.qwen3_coder:SeedOssParser",
        "kimi_k2": "penstock.tools.parsers.kimi_k2:KimiK2Parser",
        "kimi_k3": "penstock.tools.parsers.kimi_k3:KimiK3Parser",
        "cohere": "penstock.tools.parsers.cohere:CohereParser",
        "command_r": "penstock.tools.parsers.command_r:CommandRParser",
        "apertus": "penstock.tools.parsers.apertus:ApertusParser",
        "hunyuan_a13b": "penstock.tools.parsers.json_lists:HunyuanA13bParser",
        "hy_v3": "penstock.tools.parsers.glm:HyV3Parser",
        "minicpm5": "penstock.tools.parsers.minicpm5:MiniCpm5Parser",
        "nemotron": "penstock.tools.parsers.json_lists:NemotronParser",
        "functionary": "penstock.tools.parsers.functionary:FunctionaryParser",
        "functionary_v3_2": "penstock.tools.parsers.functionary_v3_2:FunctionaryV32Parser",
        "muse_glimmer": "penstock.tools.parsers.muse_glimmer:MuseGlimmerParser",
        "gigachat3": "penstock.tools.parsers.json_lists:GigaChat3Parser",
        "code": "penstock.tools.parsers.code:CodeParser",
    },
)


def get_parser(name: str) -> ToolCallParser:
    """Raises `ValueError` with the nearest name and those known."""
    return PARSERS.get(name)()
