"""A causal language model that returns the logprob of each given token, and the likeliest tokens in its place. Runs in
one thread; no HTTP here.

    logprob_n = z_n,id − log Σ_v exp z_nv        z: the model's logits after token n − 1, float32, temperature 1
    likeliest in place of n: the k largest z_nv, each less the same sum

Logits exist for a tile of positions at a time where the model's head alone makes them from its hidden states, which is
tried at the start; models that do more to their logits (scaling, soft-capping) have all of a row's at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.rollout_server.engines.checkpoint import context_length

logger = logging.getLogger(__name__)
TILE = 512
"""Positions whose logits exist at a time."""
TRIED = tuple(range(8))
"""Ids on which the two ways to the logits are compared."""
TOLERANCE = 1e-3


class UnfitTeacher(ValueError):
    """The model cannot be served as a teacher; the message has the cause."""


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """A row to be judged."""

    ids: Sequence[int]
    """[L]"""
    top_k: int = 0
    """Likeliest tokens wanted in the place of each; at most the vocabulary."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """Logprobs of all tokens of a row but the first."""

    logprobs: NDArray[np.float32]
    """[L − 1]"""
    top_ids: NDArray[np.int64]
    """[L − 1, k] the likeliest first"""
    top_logprobs: NDArray[np.float32]
    """[L − 1, k]"""

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.logprobs).all() and np.isfinite(self.top_logprobs).all())


class TokenScorer:
    """Any `AutoModelForCausalLM`."""

    def __init__(self, model: str, dtype: Literal["float32", "bfloat16"], max_tokens: int | None = None) -> None:
        """Raises `UnfitTeacher`, and `OSError` if the model does not exist."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._tokenizer_turn = threading.Lock()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        except (ValueError, KeyError) as error:
            raise UnfitTeacher(f"{model} is not a causal language model: {error}") from error
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = loaded.to(self._device).eval()
        config = loaded.config.get_text_config()
        self.vocabulary = int(loaded.get_input_embeddings().num_embeddings)
        context = context_length(config.to_dict())
        self.max_tokens = min(context, max_tokens or context)
        self._tiled = self._head_alone()
        logger.info("%s: up to %d tokens, logits %s", model, self.max_tokens, "in tiles" if self._tiled else "whole")

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text. Safe from any thread."""
        with self._tokenizer_turn:
            ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def score(self, rows: Sequence[TeacherRow]) -> list[JudgedRow]:
        """Returns the scores of `rows`. Calls may not overlap."""
        import torch

        longest = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):  # padded on the right: a causal model's tokens never see it
            ids[index, : len(row)] = torch.tensor(row.ids, dtype=torch.long)
            mask[index, : len(row)] = 1
        inputs = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device), "use_cache": False}
        with torch.inference_mode():
            whole = self._model.base_model(**inputs)[0] if self._tiled else self._model(**inputs).logits
            return [self._row(whole[index, : len(row) - 1], row) for index, row in enumerate(rows)]

    def _row(self, states: Any, row: TeacherRow) -> JudgedRow:
        """states [L − 1, H] or logits [L − 1, V]"""
        import torch

        count, k = len(states), row.top_k
        targets = torch.tensor(list(row.ids[1:]), dtype=torch.long, device=self._device)
        judged = JudgedRow(
            np.zeros(count, np.float32), np.zeros((count, k), np.int64), np.zeros((count, k), np.float32)
        )
        for start in range(0, count, TILE):
            part, sampled = states[start : start + TILE], targets[start : start + TILE]
            logits = (self._model.get_output_embeddings()(part) if self._tiled else part).float()
            total = logits.logsumexp(-1, keepdim=True)
            top, tile = logits.topk(k, dim=-1), slice(start, start + TILE)
            judged.logprobs[tile] = (logits.gather(-1, sampled[:, None]) - total).squeeze(-1).cpu().numpy()
            judged.top_ids[tile] = top.indices.cpu().numpy()
            judged.top_logprobs[tile] = (top.values - total).cpu().numpy()
        return judged

    def _head_alone(self) -> bool:
        import torch

        if self._model.base_model is self._model:  # its hidden states are not to be had by themselves
            return False
        inputs = {"input_ids": torch.tensor([TRIED], device=self._device) % self.vocabulary, "use_cache": False}
        with torch.inference_mode():
            logits = self._model(**inputs).logits
            head = self._model.get_output_embeddings()
            if head is None:
                return False
            by_head = head(self._model.base_model(**inputs)[0])
        return by_head.shape == logits.shape and bool((by_head - logits).abs().max() <= TOLERANCE)
