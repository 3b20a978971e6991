"""Chat templates of model families with their special tokens, on one small real byte-level BPE tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from penstock.agent_loops import ChatTokens, TemplateError
from penstock.agent_loops.chat.template import ChatTemplate
from penstock.tools.parsers import ParserName, ToolCall, get_parser

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = re.compile(
    r"<\|/?[A-Za-z0-9_:▁-]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_(?:turn|sentence)>|\[/?[A-Z_]+\]|</?s>|<eos>|<bos>"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<seed:[be]os>|\]~!?b\[?\]?|\[e~\[|<SPECIAL_\d+>|<sep>|</assistant>"
)
WORDS = [
    "user assistant system tool think the answer is 46",
    '{"name": "calculator", "arguments": {"expression": "1+2"}}',
]


@dataclass(frozen=True)
class Family:
    """One template as the tests use it."""

    name: str
    file: Path
    eos: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    takes_tools: bool = True
    parser: str = ""
    """Empty: the first one that reads the calls of the template."""

    def chat(self, **kwargs: Any) -> ChatTokens:
        tokenizer = tokenizer_of(self.file, self.eos)
        parser = get_parser(self.parser or parser_for(ChatTemplate(tokenizer, self.settings)))
        return ChatTokens(tokenizer, parser, template_settings=self.settings, **kwargs)


def parser_for(template: ChatTemplate) -> str:
    """Of those in the box; any of them for a template that writes no calls."""
    call = ToolCall("calculator", {"probe": "1 < 2"})
    text = template.reply_with_call([], call) or ""
    read = {name: get_parser(name).parse(text).calls for name in get_args(ParserName)}
    return next((name for name, calls in read.items() if [one.name for one in calls] == [call.name]), "hermes")


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5", TEMPLATES / "qwen2_5.jinja", "<|im_end|>", parser="hermes"),
        Family("qwen3", TEMPLATES / "qwen3.jinja", "<|im_end|>", parser="hermes"),
        Family(
            "qwen3_not_thinking", TEMPLATES / "qwen3.jinja", "<|im_end|>", {"enable_thinking": False}, parser="hermes"
        ),
        Family("llama3", TEMPLATES / "llama3.jinja", "<|eot_id|>", parser="llama3_json"),
        Family("mistral", TEMPLATES / "mistral.jinja", "</s>", parser="mistral"),
        Family("gemma", TEMPLATES / "gemma.jinja", "<end_of_turn>", takes_tools=False, parser="hermes"),
        Family("deepseek", TEMPLATES / "deepseek.jinja", "<｜end▁of▁sentence｜>", parser="deepseek"),
        Family("glm", TEMPLATES / "glm.jinja", "<|endoftext|>", parser="glm"),
        Family("gpt_oss", TEMPLATES / "gpt_oss.jinja", "<|return|>", parser="harmony"),
    )
}


THINKS_FIRST = """{%- if tools %}{{ tools | tojson }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{{ '<think></think>' }}{%- endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\n' + value + '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>\n' }}{%- endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
"""As Nemotron 3: the generation prompt opens a thought in another way than old turns show it."""


@lru_cache
def tokenizer_of(file: Path, eos: str | None) -> Any:
    """A byte-level BPE of some hundred merges; digits and words merge, so that texts have many splits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = file.read_text()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = list(
        dict.fromkeys(
            ["<|endoftext|>", "<bos>", *SPECIAL.findall(text + _rendered(text, eos)), *([eos] if eos else [])]
        )
    )
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


def _rendered(template: str, eos: str | None) -> str:
    """A conversation, for the words that the template puts together; empty where it does not take one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), eos_token=eos, bos_token="<bos>", chat_template=template
    )
    asks, says = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    try:
        return ChatTemplate(tokenizer).render([asks, says, asks], prompt=True)
    except TemplateError:
        return ""
