"""Which ids end a reply, read off what the template writes after one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from penstock.agent_loops.added_tokens import AddedTokens
from penstock.agent_loops.continuation import ASKS, Continuation
from penstock.agent_loops.errors import TemplateError
from penstock.agent_loops.template import Message

FOLLOWERS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "x"},),
    ({"role": "tool", "content": "x"},),
)


@dataclass(frozen=True, slots=True)
class Ends:
    """Qwen: all are ``<|im_end|>``. GLM closes nothing: what comes next, ``<|user|>`` or ``<|observation|>``, ends it.

    gpt-oss: the model samples ``<|return|>`` or ``<|call|>``, the template writes ``<|end|>`` or ``<|call|>``.
    Llama 3.1: ``<|eot_id|>``; its generation config has ``<|eom_id|>`` too, which the template names and opens nothing
    with: it only closes. ``<|end_of_text|>``, which the template never names, is a stop and closes no turn.
    """

    stops: tuple[int, ...]
    """A sampled one ends the reply."""
    closers: frozenset[int]
    """Only close, and so stand for each other; a stop that is no closer opens the next turn."""
    heads: frozenset[int]
    """What a delta begins with."""

    def repeats(self, last: int, first: int) -> bool:
        """The delta's first id says again what the model's last sampled one said already."""
        return (first == last and last in self.stops) or {first, last} <= self.closers


def find_ends(
    continuation: Continuation, encode: Callable[[str], list[int]], words: AddedTokens, further: Sequence[int] = ()
) -> Ends:
    """`further` ids end a reply as well. Raises `TemplateError` where the end of a reply cannot be found in ids."""
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
    return Ends(
        tuple(dict.fromkeys((*(closed or heads), *further))), frozenset(closers if closed else ()), frozenset(heads)
    )


def _deltas(continuation: Continuation) -> list[str]:
    """After a reply, before each kind of message that the template takes there."""
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
