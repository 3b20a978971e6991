"""The forms in which servers give the logprobs of a prompt's ids, and the likeliest ids in their places.

    prompt_logprobs   POST /v1/completions {"prompt": [ids], "max_tokens": 1, "prompt_logprobs": k}
                      → choices[0].prompt_logprobs: [null, {"ID": {"logprob": −1.2}, …}, …]         vLLM, teacher-server
                      the k likeliest ids, and the prompt's own if it is none of them
    echo              POST /v1/completions {"prompt": [ids], "max_tokens": 1, "echo": true, "logprobs": 1}
                      → choices[0].logprobs.token_logprobs: [null, −1.2, …]                         SGLang and others
                      its likeliest tokens are texts, not ids: no top k
    generate          POST /generate {"input_ids": [ids], "return_logprob": true, "top_logprobs_num": k, …}
                      → meta_info.input_token_logprobs: [[null, ID, null], [−1.2, ID, null], …]     SGLang, for a top k
                        meta_info.input_top_logprobs: [null, [[−0.1, ID, null], …], …]

All logprobs are those at temperature 1: none of these servers scales a prompt's by the sampling temperature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.transfer_queue import Ids, Logprobs

LOWEST = -100.0
"""Servers write −inf in their own ways (vLLM: −9999); all of them become this."""
MOST_ANSWER_BYTES = 256 << 20
"""An agent worker holds several at once."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions of reading an answer of another shape."""
Pairs = Sequence[tuple[float, int]]
"""(logprob, id)"""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the L ids of a row, and the likeliest ids in S requested places of it."""

    logprobs: Logprobs
    """[L] of each id, given those before it; the first is 0."""
    top_ids: Ids | None = None
    """[S, k] the likeliest in the places asked for, the likeliest first; None: no top k was asked for."""
    top_logprobs: Logprobs | None = None
    """[S, k]"""


class PromptForm(Protocol):
    """One way to ask."""

    name: str
    path: str

    def body(self, model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
        """The request."""

    def logprobs(self, answer: Any, ids: Sequence[int]) -> list[float]:
        """[L - 1] of ids [L]. Raises one of `MALFORMED`."""

    def likeliest(self, answer: Any, place: int) -> Pairs:
        """Returns the likeliest ids at a position, in any order. Raises one of `MALFORMED`."""


def read_prompt(form: PromptForm, answer: Any, ids: Sequence[int], places: Sequence[int], top_k: int) -> PromptLogprobs:
    """`places`: places in `ids` [L], from 1. Raises one of `MALFORMED` for an answer that is of other ids, lacks some,
    or has a logprob that is not a finite number."""
    values = form.logprobs(answer, ids)
    if not all(math.isfinite(value) for value in values):
        raise ValueError("a logprob is not a finite number")
    logprobs = np.maximum(np.array([0.0, *values], dtype=np.float32), LOWEST)
    if not top_k:
        return PromptLogprobs(logprobs)
    rows = [_first(form.likeliest(answer, place), top_k) for place in places]
    top_ids = np.array([[token for _, token in row] for row in rows], dtype=np.int32).reshape(-1, top_k)
    top_logprobs = np.array([[value for value, _ in row] for row in rows], dtype=np.float32).reshape(-1, top_k)
    return PromptLogprobs(logprobs, top_ids, np.maximum(top_logprobs, LOWEST))


def answer_bytes(tokens: int, top_k: int) -> int:
    """Largest size of an answer: about 128 bytes for one id at one place, with vLLM's rank and text."""
    return tokens * (top_k + 1) * 128


def _first(pairs: Pairs, top_k: int) -> Pairs:
    """The k likeliest; of equal ones the lower ids. Raises `ValueError` where one is not finite, or there are fewer."""
    if not all(math.isfinite(value) for value, _ in pairs):
        raise ValueError("a logprob of the likeliest ids is not a finite number")
    likeliest = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:top_k]
    if len({token for _, token in likeliest}) < top_k:
        raise ValueError(f"{len(likeliest)} likeliest ids of {top_k} asked for (agent.teachers.*.top_k)")
    return likeliest


class KeyedForm:
    """vLLM and `penstock teacher-server`."""

    name, path = "prompt_logprobs", "v1/completions"

    def body(self, model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
        return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}

    def logprobs(self, answer: Any, ids: Sequence[int]) -> list[float]:
        entries = answer["choices"][0]["prompt_logprobs"]
        if len(entries) != len(ids):
            raise ValueError(f"{len(entries)} prompt_logprobs for {len(ids)} ids")
        return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], ids[1:], strict=True)]

    def likeliest(self, answer: Any, place: int) -> Pairs:
        entries: Mapping[str, Any] = answer["choices"][0]["prompt_logprobs"][place]
        return [(float(entry["logprob"]), int(token)) for token, entry in entries.items()]


class EchoForm:
    """SGLang and other servers; used without a top k."""

    name, path = "echo", "v1/completions"

    def body(self, model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
        return {"model": model, "prompt": list(ids), **sampling}

    def logprobs(self, answer: Any, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of the prompt, then of the sampled token if there is one."""
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        if not len(ids) <= len(values) <= len(ids) + 1:
            raise ValueError(f"{len(values)} echoed logprobs for {len(ids)} ids")
        return [float(value) for value in values[1 : len(ids)]]

    def likeliest(self, answer: Any, place: int) -> Pairs:
        raise ValueError("the likeliest tokens are texts, not ids")


class GenerateForm:
    """SGLang with a top k. The server has one model."""

    name, path = "generate", "generate"

    def body(self, model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,  # whatever is cached: a prompt's logprobs are then computed anew
            "top_logprobs_num": top_k,
        }

    def logprobs(self, answer: Any, ids: Sequence[int]) -> list[float]:
        entries = answer["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != list(ids):
            raise ValueError(f"{len(entries)} input_token_logprobs, of other ids than the {len(ids)} that were sent")
        return [float(entry[0]) for entry in entries[1:]]

    def likeliest(self, answer: Any, place: int) -> Pairs:
        return [(float(entry[0]), int(entry[1])) for entry in answer["meta_info"]["input_top_logprobs"][place]]


def forms_for(top_k: int) -> Sequence[PromptForm]:
    """Return the forms in the order in which they are tried."""
    return (KeyedForm(), GenerateForm()) if top_k else (KeyedForm(), EchoForm())
