"""Special tokens: which ids end a reply, derived from what the template writes after one, and the defusing of others.

Defusing: a special token spelled out in a message (``<|im_end|>``) is written so that it encodes to ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.agent_loops.chat.continuation import ASKS, Continuation
from penstock.agent_loops.chat.template import Message
from penstock.agent_loops.errors import TemplateError
from penstock.agent_loops.segment import ReplyEnds


class AddedTokens:
    """`special` by the tokenizer's own mark: its named ones (end of text …) are not all of them, as in gpt-oss."""

    def __init__(self, tokenizer: Any) -> None:
        added = {int(number): token for number, token in tokenizer.added_tokens_decoder.items()}
        marked = {number: str(token.content) for number, token in added.items() if token.special}
        self._marked = marked
        self.texts = {number: str(token.content) for number, token in added.items()}
        """Id → text of every added token."""
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

    def defused_text(text: str) -> str:
        return words.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": defused_text(content)} if words.search(content) else message
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for part in content:
        has_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
        parts.append({**part, "text": defused_text(part["text"])} if has_text else part)
    return {**message, "content": parts}


def find_reply_ends(
    continuation: Continuation, encode: Callable[[str], list[int]], words: AddedTokens, further: Sequence[int] = ()
) -> ReplyEnds:
    """`further` ids end a reply too. Raises `TemplateError` if the end of a reply cannot be found in ids."""
    texts, deltas = continuation.closings(), _deltas(continuation)
    stop_words = [words.texts[number] for number in further if number in words.texts]
    closings = _unique(_closing(text, deltas, continuation.special, stop_words) for text in texts)
    leads = _unique(
        max((closing for closing in closings if delta.startswith(closing)), key=len, default="")
        or _first_special(delta, continuation.special)
        for delta in deltas
    )
    if not leads and any(word in text for text in texts for word in stop_words):
        return ReplyEnds(tuple(dict.fromkeys(further)), frozenset(), ())
    if not leads:
        raise TemplateError(
            f"the chat template closes a reply with {texts[0]!r}, which does not begin with a special token, and "
            "none follows; the end of a reply cannot be found in ids"
        )
    ids = {text: tuple(encode(text)) for text in (*closings, *leads)}
    closed = list(dict.fromkeys(ids[text][-1] for text in closings))
    heads = list(dict.fromkeys(ids[text][-1] for text in leads))
    closers = {ids[lead][-1] for lead in leads if ids[lead][-1] in closed or _closes(lead, deltas, encode, words)}
    if closed:
        opening = {*heads, *encode(continuation.template.render([ASKS], prompt=True))}
        closers |= {*closed, *(set(words.named_in(continuation.template.source)) & set(further) - opening)}
    return ReplyEnds(
        tuple(dict.fromkeys((*(closed or heads), *further))),
        frozenset(closers if closed else ()),
        tuple(sorted((ids[lead] for lead in leads), key=len, reverse=True)),
    )


def _closing(text: str, deltas: Sequence[str], special: re.Pattern[str], stop_words: Sequence[str]) -> str:
    """Returns the part of `text`, which ends a conversation, that closes the reply; empty if nothing does.

    All up to the first word that ends a reply, where what follows in a conversation begins so too; else a special
    token, white space before it included, with no text after it.
    """
    cuts = sorted(text.find(word) + len(word) for word in stop_words if word in text)
    if cuts and any(delta.startswith(text[: cuts[0]]) for delta in deltas):
        return text[: cuts[0]]
    return "" if special.sub("", text).strip() else _first_special(text, special)


def _first_special(text: str, special: re.Pattern[str]) -> str:
    """The special token that `text` begins with, white space before it included; empty if it begins with none."""
    match = re.match(rf"\s*(?:{special.pattern})", text)
    return match[0] if match else ""


def _unique(texts: Iterable[str]) -> list[str]:
    """Return the texts that are not empty, each once."""
    return list(dict.fromkeys(text for text in texts if text))


def _deltas(continuation: Continuation) -> list[str]:
    """Deltas after a reply, for each kind of message that the template accepts there."""
    deltas, refusal = [], TemplateError("nothing was tried")
    for role in ("user", "tool"):
        try:
            deltas.append(continuation.delta([{"role": role, "content": "x"}]))
        except TemplateError as error:
            refusal = error
    if not deltas:
        raise refusal
    return deltas


def _closes(lead: str, deltas: Sequence[str], encode: Callable[[str], list[int]], words: AddedTokens) -> bool:
    """Another special token follows at once, white space aside: the first one closed, the second opens."""
    spaces = {token for space in (" ", "\n", "\n\n") for token in encode(space)}
    for delta in deltas:
        rest = [token for token in encode(delta[len(lead) :])[:2] if token not in spaces]
        if delta.startswith(lead) and rest and rest[0] in words.special_ids:
            return True
    return False
