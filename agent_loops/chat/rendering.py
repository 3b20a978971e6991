"""Messages to ids by a model's own tokenizer, chat template and, for images, processor. Holds no episode's state."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from penstock.agent_loops.chat.continuation import Continuation
from penstock.agent_loops.chat.images import ImagePlaces, Part, parts_of, take
from penstock.agent_loops.chat.special_tokens import AddedTokens, any_of, defused, find_reply_ends
from penstock.agent_loops.chat.template import ChatTemplate, Message, Tools
from penstock.agent_loops.errors import TemplateError
from penstock.agent_loops.segment import MessageDelta
from penstock.tools.parsers import ToolCall


class Rendering:
    """`stop_ids` end a reply in addition to those that the template shows; `processor`: of `load_processor`."""

    def __init__(
        self, tokenizer: Any, template_settings: Mapping[str, Any] | None, stop_ids: Sequence[int], processor: Any
    ) -> None:
        self.tokenizer = tokenizer
        self._backend = backend_of(tokenizer)
        self.template = ChatTemplate(tokenizer, template_settings)
        words = AddedTokens(tokenizer)
        self.continuation = Continuation(self.template, any_of(words.special))
        self._turn_words = any_of([*words.special, *words.shown_in(self.continuation.turn())])
        candidates = [tokenizer.eos_token_id, *stop_ids]
        stops = [number for number in candidates if number is not None and number < len(tokenizer)]
        self.ends = find_reply_ends(self.continuation, self.encode, words, stops)
        self.places = None if processor is None else ImagePlaces(processor)
        """None: the model takes no images."""
        self.prompt = lru_cache(512)(self.prompt_anew)
        """`prompt_anew`, remembered: the episodes of a group begin alike."""

    # text and ids --------------------------------------------------------------------------------------------------
    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Raises `TemplateError` where the tokenizer panics."""
        try:
            if self._backend is not None and is_untouched(self._backend):
                return ids_of(self._backend, text)
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            # A panic of the Rust library is not an Exception: it would pass every handler and end the process.
            if type(error).__name__ != "PanicException":
                raise
            raise TemplateError(f"the tokenizer cannot encode these {len(text)} characters: {error}") from error
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Text of `ids`, character for character; special tokens kept unless `special` is False."""
        ids = ids.ids if isinstance(ids, MessageDelta) else ids
        text: str
        if self._backend is not None and type(ids) is list:
            text = self._backend.decode(ids, skip_special_tokens=not special)
            return text
        text = self.tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    # messages and ids ----------------------------------------------------------------------------------------------
    def prompt_anew(self, conversation: str) -> array[int]:
        """Ids of `key_of(messages, tools)` up to where the model is to answer. Raises `TemplateError`."""
        messages, tools = json.loads(conversation)
        return array("i", self.encode(self.prompt_text(messages, tools)))

    def prompt_text(self, messages: Sequence[Message], tools: Tools) -> str:
        """The same as text. Raises `TemplateError`."""
        messages = take(messages, {})
        parts = self._image_parts(messages)
        text = self.template.render(self.template.fitted(messages), tools, prompt=True)
        return self.places.widen(text, parts) if self.places else text

    def delta(self, messages: Sequence[Message], tools: Tools, calls: Sequence[ToolCall]) -> list[int]:
        """End of the reply, the messages, opening of the next reply. Raises `TemplateError`."""
        parts = self._image_parts(messages)
        text = self.continuation.delta([self.defused(message) for message in messages], calls, tools)
        ids = self.encode(self.places.widen(text, parts) if self.places else text)
        if not self.ends.lead_of(ids):
            raise TemplateError("the chat template closes a reply differently before these messages")
        return ids

    def defused(self, message: Message) -> Message:
        """The message with words that open or close a turn made ordinary text where its text spells them."""
        return defused(message, self._turn_words)

    def with_ids(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
        """Defused, results with the name and id of the call that they answer."""
        return [self.defused(message) for message in self.continuation.with_calls(messages, calls)]

    # what the template and the model say of themselves -------------------------------------------------------------
    @cached_property
    def opening_tokens(self) -> int:
        """Ids of the opening of a reply, which a prompt ends with."""
        return self.continuation.opening_tokens(self.encode)

    @cached_property
    def placeholders(self) -> frozenset[int]:
        """Ids of an image's place in the context."""
        return frozenset(self.encode(self.places.token)) if self.places else frozenset()

    def _image_parts(self, messages: Sequence[Message]) -> list[Part]:
        parts = parts_of(messages)
        if self.places is None and parts:
            raise TemplateError("this model takes no images: its folder has no image processor (preprocessor_config)")
        return parts


def backend_of(tokenizer: Any) -> Any:
    """The Rust tokenizer of a transformers tokenizer that only wraps it; else None. The wrapper asks the same of it, at
    several times the cost: a batch of one, masks next to the ids, a look at each id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    own = [getattr(type(tokenizer), name, None) for name in ("encode", "_encode_plus", "decode", "_decode")]
    modules = [getattr(method, "__module__", "") for method in own]
    if backend is None or not all(module.startswith("transformers.tokenization_utils") for module in modules):
        return None
    # The wrapper sets the Rust tokenizer up at each call, here as it is left behind.
    probe = "A word, <|im_end|>\n<s> and </s>  two\u00e4."
    same = tokenizer.encode(probe, add_special_tokens=False) == ids_of(backend, probe)
    ids = backend.encode(probe, add_special_tokens=False).ids
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return backend if same and text == backend.decode(ids, skip_special_tokens=False) else None


def ids_of(backend: Any, text: str) -> list[int]:
    """Ids by the call that leaves out where in `text` each of them stands, which is near half of the work."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def is_untouched(backend: Any) -> bool:
    """Returns whether the Rust tokenizer neither cuts nor pads nor splits special tokens; the wrapper resets these."""
    return backend.truncation is None and backend.padding is None and not backend.encode_special_tokens


def key_of(messages: Sequence[Message], tools: Tools) -> str:
    """A conversation as text, for `Rendering.prompt`."""
    return json.dumps([list(messages), list(tools)], ensure_ascii=False)
