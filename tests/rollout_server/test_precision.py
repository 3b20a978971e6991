"""The settings and the comparisons of tests whose arithmetic rounds, and of engines that share a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.rollout_server import precision
from tests.rollout_server.conformance.subject import engine_config
from tests.rollout_server.precision import TOLERANCES, Tolerance, assert_close, assert_greedy, behind_likeliest, common

AT_ONCE = 3
"""Of one kind: with files, with broadcasts, and one that a test starts beside them."""


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "gpu_memory_utilization"), ("sglang", "mem_fraction_static")])
def test_engines_share_a_gpu_and_only_a_gpu(engine: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def arguments(**changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = getattr(engine_config(engine, **changes), f"{engine}_args")
        return found

    monkeypatch.setattr(precision, "ON_GPU", False)
    without = arguments()
    assert flag not in without
    monkeypatch.setattr(precision, "ON_GPU", True)
    assert {**without, flag: precision.SHARE}.items() <= arguments().items()
    own = {"tensor_parallel_size": 2, flag: 0.5}  # of a test
    assert own.items() <= arguments(**{f"{engine}_args": own}).items()
    assert AT_ONCE * precision.SHARE < 0.9
    assert precision.with_share("hf", {}) == {"dtype": precision.DTYPE}


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "found"),
    [
        ("float32", False, {"hf": "float32", "vllm": "float32", "sglang": "float32"}),
        ("float32", True, {"hf": "float32", "vllm": "tf32", "sglang": "tf32"}),
        ("bfloat16", True, {"hf": "bfloat16", "vllm": "bfloat16", "sglang": "bfloat16"}),
    ],
)
def test_arithmetic_of_each_engine_has_tolerances(
    dtype: str, on_gpu: bool, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "DTYPE", dtype)
    monkeypatch.setattr(precision, "ON_GPU", on_gpu)
    assert {engine: precision.arithmetic(engine) for engine in found} == found
    for engine, arithmetic in found.items():
        assert {engine, "adapter"} <= TOLERANCES[arithmetic].keys()
    triton = {"attention_backend": "triton"}.items() <= precision.with_share("sglang", {}).get(
        "sglang_args", {}
    ).items()
    assert triton == (found["sglang"] == "tf32")


def test_logprobs_may_differ_at_one_token_and_little_on_the_mean() -> None:
    allowed = Tolerance(largest=0.1, mean=0.02)
    assert_close([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.07, -3.0, -4.0], allowed)
    for wrong in ([-1.0, -2.11, -3.0, -4.0], [-1.03, -2.03, -3.03, -4.03]):
        with pytest.raises(AssertionError):
            assert_close([-1.0, -2.0, -3.0, -4.0], wrong, allowed)


class Counting:
    """Its logits after token t: nearly as much for t + 2 as for t + 1."""

    def model(self, input_ids: Any) -> Any:
        import torch

        logits = torch.zeros(1, input_ids.shape[1], 16)
        for at, token in enumerate(input_ids[0].tolist()):
            logits[0, at, (token + 1) % 16], logits[0, at, (token + 2) % 16] = 5.0, 4.95
        return SimpleNamespace(logits=logits)

    def greedy(self, context: list[int], count: int) -> list[int]:
        return [(context[-1] + 1 + at) % 16 for at in range(count)]


@pytest.mark.torch
def test_a_greedy_token_is_nearly_the_likeliest_where_arithmetic_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    policy, near = Counting(), [4, 6, 7]
    assert behind_likeliest(policy, [3], near) == pytest.approx([0.0, 0.05, 0.0], abs=1e-6)
    monkeypatch.setattr(precision, "DTYPE", "bfloat16")
    assert_greedy("hf", policy, [3], near)
    with pytest.raises(AssertionError):
        assert_greedy("hf", policy, [3], [4, 9, 10])
    monkeypatch.setattr(precision, "DTYPE", "float32")
    assert_greedy("hf", policy, [3], [4, 5, 6])
    with pytest.raises(AssertionError):
        assert_greedy("hf", policy, [3], near)


def test_common_beginnings() -> None:
    assert [common([1, 2, 3], other) for other in ([1, 2, 4], [1, 2, 3], [5], [1, 2])] == [2, 3, 0, 2]
