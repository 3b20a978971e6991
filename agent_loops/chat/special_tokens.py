"""Special tokens: which ids end a reply, derived from what the template writes after one, and the defusing of others.

Defusing: a special token spelled out in a message (``<|im_end|>``) is written so that it encodes to ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock.agent_loops.chat.continuation import ASKS, Continuation
from penstock.agent_loops.chat.template import Message
from penstock.agent_loops.errors import TemplateError
from penstock.agent_loops.segment import ReplyEnds

FOLLOWERS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "x"},),
    ({"role": "tool", "content": "x"},),
)


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
        """Words not marked special that are part of a turn's frame, such as DeepSeek's ``<｜User｜>``."""
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


def find_reply_ends(
    continuation: Continuation, encode: Callable[[str], list[int]], words: AddedTokens, further: Sequence[int] = ()
) -> ReplyEnds:
    """`further` ids end a reply too. Raises `TemplateError` if the end of a reply cannot be found in ids."""
    special = words.special_ids
    closings = continuation.closings()
    closed = _first_ids([encode(text) for text in closings], special)
    deltas = [encode(text) for text in _deltas(continuation)]
    heads = _first_ids(deltas, special)
    if not heads:
        raise TemplateError(
            f"the chat template closes a reply with {closings[0]!r}, which does not begin with a special token, and "
            "none follows; the end of a reply cannot be found in ids"
        )
    closers = {head for ids in deltas for head in ids[:1] if head in closed or _closes(ids, encode, special)}
    if closed:
        opening = {*heads, *encode(continuation.template.render([ASKS], prompt=True))}
        closers |= {*closed, *(set(words.named_in(continuation.template.source)) & set(further) - opening)}
    return ReplyEnds(
        tuple(dict.fromkeys((*(closed or heads), *further))), frozenset(closers if closed else ()), frozenset(heads)
    )


def _deltas(continuation: Continuation) -> list[str]:
    """Deltas after a reply, for each kind of message that the template accepts there."""
    deltas, refusal = [], TemplateError("nothing was tried")
    for messages in FOLLOWERS:
        try:
            deltas.append(continuation.delta(messages))
        except TemplateError as error:
            refusal = error
    if not deltas:
        raise refusal
    return deltas


def _closes(delta: Sequence[int], encode: Callable[[str], list[int]], special: Collection[int]) -> bool:
    """Another special token follows at once, white space aside: the first one closed, the second opens."""
    spaces = {token for space in (" ", "\n", "\n\n") for token in encode(space)}
    rest = [token for token in delta[1:3] if token not in spaces]
    return bool(rest) and rest[0] in special


def _first_ids(deltas: Sequence[Sequence[int]], special: Collection[int]) -> list[int]:
    return list(dict.fromkeys(ids[0] for ids in deltas if ids and ids[0] in special))
