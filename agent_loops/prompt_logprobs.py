"""The forms in which servers give the logprobs of a prompt's ids, and the likeliest ids in their places.

    prompt_logprobs   POST /v1/completions {"prompt": [ids], "max_tokens": 1, "prompt_logprobs": k}
                      → choices[0].prompt_logprobs: [null, {"ID": {"logprob": −1.2}, …}, …]         vLLM, teacher-server
                      the k likeliest ids, and the prompt's own where it is none of them
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transfer_queue import Ids, Logprobs

LOWEST = -100.0
"""Servers write −inf in their own ways (vLLM: −9999); all of them become this."""
ENTRY_BYTES = 128
"""Of an answer, for one id at one place; vLLM writes rank and text beside the logprob."""
MOST_ANSWER_BYTES = 256 << 20
"""An agent worker holds several at once."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer of another shape raises."""
Pairs = Sequence[tuple[float, int]]
"""(logprob, id)"""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What a server says of the L ids of a row, and of S places in it that it was asked for."""

    logprobs: Logprobs
    """[L] of each id, given those before it; the first is 0."""
    top_ids: Ids | None = None
    """[S, k] the likeliest in the places asked for, the likeliest first; None: no top k was asked for."""
    top_logprobs: Logprobs | None = None
    """[S, k]"""


@dataclass(frozen=True, slots=True)
class PromptForm:
    """One way to ask."""

    name: str
    path: str
    body: Callable[[str, Sequence[int], int], dict[str, Any]]
    """(model, ids, k) → the request"""
    given: Callable[[Any, Sequence[int]], list[float]]
    """(answer, ids [L]) → [L − 1] logprobs. Raises one of `MALFORMED`."""
    likeliest: Callable[[Any, int], Pairs] | None
    """(answer, place) → of that place, in any order. None: the form has no ids of a top k."""


def read_prompt(form: PromptForm, answer: Any, ids: Sequence[int], wanted: Sequence[int], top_k: int) -> PromptLogprobs:
    """`wanted`: places in `ids` [L], from 1. Raises one of `MALFORMED` for an answer that is of other ids, lacks some,
    or has a logprob that is not a finite number."""
    given = form.given(answer, ids)
    if not all(math.isfinite(value) for value in given):
        raise ValueError("a logprob is not a finite number")
    logprobs = np.maximum(np.array([0.0, *given], dtype=np.float32), LOWEST)
    if not top_k:
        return PromptLogprobs(logprobs)
    assert form.likeliest is not None
    top_ids, top_logprobs = _arrays([_first(form.likeliest(answer, place), top_k) for place in wanted], top_k)
    return PromptLogprobs(logprobs, top_ids, np.maximum(top_logprobs, LOWEST))


def answer_bytes(tokens: int, top_k: int) -> int:
    """About what an answer takes at most."""
    return tokens * (top_k + 1) * ENTRY_BYTES


def _first(pairs: Pairs, top_k: int) -> Pairs:
    """The k likeliest; of equal ones the lower ids. Raises `ValueError` where one is not finite, or there are fewer."""
    if not all(math.isfinite(value) for value, _ in pairs):
        raise ValueError("a logprob of the likeliest ids is not a finite number")
    found = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:top_k]
    if len({token for _, token in found}) < top_k:
        raise ValueError(f"{len(found)} likeliest ids of {top_k} asked for (agent.teachers.*.top_k)")
    return found


def _arrays(rows: Sequence[Pairs], top_k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[S, k] each"""
    ids = np.array([[token for _, token in row] for row in rows], dtype=np.int32).reshape(-1, top_k)
    logprobs = np.array([[value for value, _ in row] for row in rows], dtype=np.float32).reshape(-1, top_k)
    return ids, logprobs


# prompt_logprobs -----------------------------------------------------------------------------------------------------
def _keyed_body(model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
    return {**_completion(model, ids), "prompt_logprobs": top_k}


def _completion(model: str, ids: Sequence[int]) -> dict[str, Any]:
    return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}


def _keyed(answer: Any, ids: Sequence[int]) -> list[float]:
    found = answer["choices"][0]["prompt_logprobs"]
    if len(found) != len(ids):
        raise ValueError(f"{len(found)} prompt_logprobs for {len(ids)} ids")
    return [float(one[str(token)]["logprob"]) for one, token in zip(found[1:], ids[1:], strict=True)]


def _keyed_likeliest(answer: Any, place: int) -> Pairs:
    entries: Mapping[str, Any] = answer["choices"][0]["prompt_logprobs"][place]
    return [(float(entry["logprob"]), int(token)) for token, entry in entries.items()]


# echo ----------------------------------------------------------------------------------------------------------------
def _echo_body(model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
    return {**_completion(model, ids), "echo": True, "logprobs": 1}


def _echoed(answer: Any, ids: Sequence[int]) -> list[float]:
    """Those of the prompt, then of the token that was sampled, if one was."""
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    if not len(ids) <= len(found) <= len(ids) + 1:
        raise ValueError(f"{len(found)} echoed logprobs for {len(ids)} ids")
    return [float(value) for value in found[1 : len(ids)]]


# generate ------------------------------------------------------------------------------------------------------------
def _generate_body(model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
    """From place 0 on, whatever is cached: a prompt's logprobs are computed anew then. The server has one model."""
    return {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top_k,
    }


def _generated(answer: Any, ids: Sequence[int]) -> list[float]:
    found = answer["meta_info"]["input_token_logprobs"]
    if [one[1] for one in found] != list(ids):
        raise ValueError(f"{len(found)} input_token_logprobs, of other ids than the {len(ids)} that were sent")
    return [float(one[0]) for one in found[1:]]


def _generated_likeliest(answer: Any, place: int) -> Pairs:
    return [(float(one[0]), int(one[1])) for one in answer["meta_info"]["input_top_logprobs"][place]]


KEYED = PromptForm("prompt_logprobs", "v1/completions", _keyed_body, _keyed, _keyed_likeliest)
ECHO = PromptForm("echo", "v1/completions", _echo_body, _echoed, None)
GENERATE = PromptForm("generate", "generate", _generate_body, _generated, _generated_likeliest)


def forms_for(top_k: int) -> Sequence[PromptForm]:
    """In the order in which they are tried."""
    return (KEYED, GENERATE) if top_k else (KEYED, ECHO)
