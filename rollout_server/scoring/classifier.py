"""A sequence classifier that returns one number per conversation. Runs in one thread; no HTTP here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.rollout_server.engines.checkpoint import context_length

logger = logging.getLogger(__name__)


class BadModel(ValueError):
    """The model cannot be a reward model; the message has the cause."""


class BadConversation(ValueError):
    """The model's chat template rejects these messages; the message has its error."""


class HuggingFaceClassifier:
    """Any `AutoModelForSequenceClassification`.

    With one label the score is its logit; with more, the probability of `label`.
    """

    def __init__(
        self, model: str, label: int | None, dtype: Literal["float32", "bfloat16"], max_tokens: int | None
    ) -> None:
        """Raises `BadModel`, and `OSError` if the model does not exist."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._tokenizer_turn = threading.Lock()  # a tokenizer that truncates or pads is changed by each call
        loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=getattr(torch, dtype))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = loaded.to(self._device).eval()
        self._label = _checked_label(label, loaded.config.num_labels)
        self._pad = _pad_id(self._tokenizer, loaded.config)
        context = context_length(loaded.config.get_text_config().to_dict())
        self.max_tokens = min(context, max_tokens or context)
        # Classifiers on causal models look for the last token that is not padding, with the model's own padding id.
        loaded.config.pad_token_id = self._pad
        logger.info("%s: %d labels, up to %d tokens", model, loaded.config.num_labels, self.max_tokens)

    def encode(self, messages: Sequence[Mapping[str, Any]], answer: str) -> tuple[list[int], bool]:
        """Token ids of a conversation that ends with `answer`, and whether its beginning was cut.

        Called from any thread. Raises `BadConversation`.
        """
        conversation: list[Any] = [*messages, {"role": "assistant", "content": answer}]
        text = "\n".join(str(message.get("content") or "") for message in conversation)
        if templated := bool(self._tokenizer.chat_template):
            try:
                text = str(self._tokenizer.apply_chat_template(conversation, tokenize=False))
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise BadConversation(f"this model's chat template rejects these messages: {cause}") from error
        with self._tokenizer_turn:
            ids = self._tokenizer(text, add_special_tokens=not templated)["input_ids"]
        return ids[-self.max_tokens :], len(ids) > self.max_tokens

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """A number per row of token ids, NaN if the model returns it. One call at a time, from one thread."""
        import torch

        longest = max(1, *(len(row) for row in ids))
        padded = torch.full((len(ids), longest), self._pad, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for index, row in enumerate(ids):
            padded[index, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[index, : len(row)] = 1
        with torch.inference_mode():
            logits = self._model(padded.to(self._device), attention_mask=mask.to(self._device)).logits.float()
        values = logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]
        numbers: list[float] = values.tolist()
        return numbers


def _checked_label(label: int | None, labels: int) -> int | None:
    if labels == 1:
        if label not in (None, 0):
            raise BadModel(f"the model has one label; --label is {label}")
        return None
    if label is None or not 0 <= label < labels:
        raise BadModel(
            f"the model has {labels} labels: choose with --label (0 … {labels - 1}) whose probability is the score"
        )
    return label


def _pad_id(tokenizer: Any, config: Any) -> int:
    for candidate in (tokenizer.pad_token_id, config.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    raise BadModel("neither the tokenizer nor the model has a padding or an end token")
