"""Chat templates of model families with their special tokens, on one small real byte-level BPE tokenizer.

``PENSTOCK_CHAT_TEMPLATES=FILE[:FILE…]`` adds template files to those that the tests run on; a file's special tokens are
read off its text (``<|…|>``, ``<｜…｜>``, ``<…_of_turn>``, ``[CAPITALS]``). Neither is downloaded.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.agent_loops.chat import ChatTokens
from penstock.tools.parsers import ParsedTurn, ToolCall

TEMPLATES = Path(__file__).parent / "templates"
FILES_FROM = "PENSTOCK_CHAT_TEMPLATES"
SPECIAL = re.compile(r"<\|[a-z_]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|</?s>|<eos>|<bos>")
WORDS = [
    "user assistant system tool think the answer is 46",
    '{"name": "calculator", "arguments": {"expression": "1+2"}}',
]


class FamilyParser:
    """Reads the one-call replies of every template here; what the families' own parsers do is tested with them."""

    FORMS = (
        re.compile(r'"name": "(?P<name>\w+)", "(?:arguments|parameters)": (?P<arguments>\{.*?\})[,}]', re.DOTALL),
        re.compile(r"<｜tool▁sep｜>(?P<name>\w+)\n```json\n(?P<arguments>.*?)\n```", re.DOTALL),
        re.compile(
            r"to=functions\.(?P<name>\w+)<\|channel\|>commentary json<\|message\|>(?P<arguments>.*?)<\|call\|>",
            re.DOTALL,
        ),
    )
    GLM = re.compile(r"<tool_call>(?P<name>\w+)\n(?P<arguments>.*?)</tool_call>", re.DOTALL)
    ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\n<arg_value>(.*?)</arg_value>", re.DOTALL)

    def parse(self, text: str) -> ParsedTurn:
        found = next((found for form in self.FORMS if (found := form.search(text))), None)
        if found:
            return ParsedTurn(
                text[: found.start()], (ToolCall(found["name"], json.loads(found["arguments"]), "call_0"),)
            )
        if found := self.GLM.search(text):
            return ParsedTurn(
                text[: found.start()],
                (ToolCall(found["name"], dict(self.ARGUMENT.findall(found["arguments"])), "call_0"),),
            )
        return ParsedTurn(text)


@dataclass(frozen=True)
class Family:
    """One template as the tests use it."""

    name: str
    file: Path
    eos: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    takes_tools: bool = True

    def chat(self, **kwargs: Any) -> ChatTokens:
        return ChatTokens(tokenizer_of(self.file, self.eos), FamilyParser(), template_settings=self.settings, **kwargs)


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5", TEMPLATES / "qwen2_5.jinja", "<|im_end|>"),
        Family("qwen3", TEMPLATES / "qwen3.jinja", "<|im_end|>"),
        Family("qwen3_not_thinking", TEMPLATES / "qwen3.jinja", "<|im_end|>", {"enable_thinking": False}),
        Family("llama3", TEMPLATES / "llama3.jinja", "<|eot_id|>"),
        Family("mistral", TEMPLATES / "mistral.jinja", "</s>"),
        Family("gemma", TEMPLATES / "gemma.jinja", "<end_of_turn>", takes_tools=False),
        Family("deepseek", TEMPLATES / "deepseek.jinja", "<｜end▁of▁sentence｜>"),
        Family("glm", TEMPLATES / "glm.jinja", "<|endoftext|>"),
        Family("gpt_oss", TEMPLATES / "gpt_oss.jinja", "<|return|>"),
    )
}


def given_files() -> list[Path]:
    """Templates that somebody wants to have tried."""
    return [Path(path) for path in os.environ.get(FILES_FROM, "").split(os.pathsep) if path]


GIVEN = given_files()


@lru_cache
def tokenizer_of(file: Path, eos: str | None) -> Any:
    """A byte-level BPE of some hundred merges; digits and words merge, so that texts have many splits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = file.read_text()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(["<|endoftext|>", "<bos>", *SPECIAL.findall(text), *([eos] if eos else [])]))
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*WORDS * 20, SPECIAL.sub(" ", text)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        bos_token="<bos>",
        chat_template=text,
    )
