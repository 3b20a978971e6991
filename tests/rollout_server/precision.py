"""Arithmetic of the engines under test, how near their logprobs are to a plain forward pass, their share of a GPU.

`PENSTOCK_TEST_DTYPE` (float32, bfloat16) is `rollout.dtype` of every engine that a `Subject` starts. The reference
computes in float32 in any case, with weights that were rounded to that dtype: what is compared is arithmetic alone.

| `TOLERANCES` | attention | ids of greedy answers |
|---|---|---|
| float32 | any on CPUs, the engine hf on any machine | those of the reference |
| tf32: float32 on a GPU | vLLM's `TRITON_ATTN`, which it takes by itself; SGLang is given `triton` | near it |
| bfloat16 | any | near it |

Float32 on a GPU is not that of a CPU: vLLM's other kernels of attention refuse it, and Triton multiplies it as tf32 by
default, with 10 bits of mantissa. Where arithmetic rounds, two tokens whose logprobs are nearly equal change places,
and from there on answers are others: a greedy token is then one that the reference gives nearly the largest logprob,
and two answers are compared up to where they part.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

DTYPE = os.environ.get("PENSTOCK_TEST_DTYPE", "float32")
ON_GPU = shutil.which("nvidia-smi") is not None
HEAD_DIM = 64 if ON_GPU else 32
"""Of attention: kernels of vLLM for CPUs begin at 32, FlashInfer's at 64."""
SHARE = 0.2
"""Of a GPU's memory, for each engine: the conformance suite has three of one kind at once, and memory beside shares."""


@dataclass(frozen=True)
class Tolerance:
    """Of |logprob − that of a plain forward pass| over the tokens of an answer."""

    largest: float
    mean: float


TOLERANCES: dict[str, dict[str, Tolerance]] = {
    "float32": {
        "hf": Tolerance(2e-5, 2e-5),
        "vllm": Tolerance(1e-4, 1e-4),
        "sglang": Tolerance(2e-5, 2e-5),
        "adapter": Tolerance(2e-4, 2e-4),
    },
    "tf32": dict.fromkeys(("vllm", "sglang", "adapter"), Tolerance(2e-2, 4e-3)),
    "bfloat16": {
        **dict.fromkeys(("hf", "vllm", "sglang"), Tolerance(0.1, 0.025)),
        "adapter": Tolerance(0.1, 0.025),
    },
}
"""By arithmetic and engine. ``adapter``: B·A is added to the weights, by the peft model to the activations.

Measured on CPUs in bfloat16, the largest difference and the largest mean of an answer: 0.040 and 0.013 (hf), 0.039 and
0.011 (vLLM). tf32 was measured nowhere.
"""


class Policy(Protocol):
    """A model without an engine: `Reference`, `PeftPolicy`."""

    model: Any

    def greedy(self, context: list[int], count: int) -> list[int]: ...


def arithmetic(engine: str) -> str:
    """Key of `TOLERANCES`."""
    return "tf32" if DTYPE == "float32" and ON_GPU and engine != "hf" else DTYPE


def tolerance(engine: str, what: str | None = None) -> Tolerance:
    return TOLERANCES[arithmetic(engine)][what or engine]


def with_share(engine: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`RolloutConfig` changes for an engine that is one of several on this machine's GPU, if it has one."""
    changed = {"dtype": DTYPE, **settings}
    ours: dict[str, dict[str, Any]] = {
        "vllm": {"gpu_memory_utilization": SHARE},
        "sglang": {
            "mem_fraction_static": SHARE,
            **({"attention_backend": "triton"} if arithmetic("sglang") == "tf32" else {}),
        },
    }
    if ON_GPU and engine in ours:
        changed[f"{engine}_args"] = ours[engine] | changed.get(f"{engine}_args", {})
    return changed


def rounded(tensor: Any) -> Any:
    """As an engine of `DTYPE` holds it, in float32."""
    import torch

    return tensor.to(getattr(torch, DTYPE)).float()


def plain_logprobs(model: Any, context: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    """Of each sampled id, by one forward pass over everything."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1].float()
    scores = (logits / temperature).log_softmax(-1)
    found: list[float] = scores.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()
    return found


def plain_greedy(model: Any, context: list[int], count: int) -> list[int]:
    import torch

    ids = list(context)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def assert_close(found: Sequence[float], expected: Sequence[float], allowed: Tolerance) -> None:
    """Logprobs of the same tokens."""
    assert list(found) == pytest.approx(list(expected), abs=allowed.largest)
    apart = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    assert sum(apart) <= allowed.mean * len(apart)


def assert_greedy(engine: str, policy: Policy, context: list[int], ids: list[int], what: str | None = None) -> None:
    """The greedy answer to `context`; of one whose arithmetic rounds, each token is nearly the likeliest."""
    if arithmetic(engine) == "float32":
        assert ids == policy.greedy(context, len(ids))
    else:
        assert max(_behind_likeliest(policy, context, ids)) <= 2 * tolerance(engine, what).largest


def _behind_likeliest(policy: Policy, context: list[int], ids: list[int]) -> list[float]:
    """Largest logprob − that of the token, for each of `ids`, by one forward pass."""
    import torch

    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([context + ids])).logits[0, len(context) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    found: list[float] = (logits.max(-1).values - chosen).tolist()
    return found


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    ends = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(ends, min(len(one), len(other)))
