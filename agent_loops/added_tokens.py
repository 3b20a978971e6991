"""The tokens of a tokenizer that are written as one word, such as ``<|im_end|>``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.agent_loops.template import Message


class AddedTokens:
    """`special` by the tokenizer's own mark: its named ones (end of text …) are not all of them, as in gpt-oss."""

    def __init__(self, tokenizer: Any) -> None:
        added = {int(number): token for number, token in tokenizer.added_tokens_decoder.items()}
        marked = {number: str(token.content) for number, token in added.items() if token.special}
        self._marked = marked
        self.special = sorted(set(marked.values()))
        self.special_ids = frozenset(marked) | frozenset(tokenizer.all_special_ids)
        self._plain = sorted({str(token.content) for token in added.values() if not token.special})

    def named_in(self, text: str) -> list[int]:
        """Ids of special tokens that `text` spells out."""
        return [number for number, word in self._marked.items() if word in text]

    def shown_in(self, turn: str) -> list[str]:
        """Words not marked special that nevertheless make up a turn, such as DeepSeek's ``<｜User｜>``."""
        return [word for word in self._plain if word.strip() and word in turn]


def any_of(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(word) for word in words) or r"(?!)")


def defused(message: Message, words: re.Pattern[str]) -> Message:
    """``<|im_end|>`` → ``< |im_end|>`` in its text: reads the same, encodes to ordinary tokens."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return {**message, "content": [_defused_part(part, words) for part in content]}
    if not isinstance(content, str) or not words.search(content):
        return message
    return {**message, "content": _defused_text(content, words)}


def _defused_part(part: Any, words: re.Pattern[str]) -> Any:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return part
    return {**part, "text": _defused_text(part["text"], words)}


def _defused_text(text: str, words: re.Pattern[str]) -> str:
    return words.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
