"""The GPU's kernel for packed rows gives what the rows alone give, and is given what it takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention

from penstock.trainer.engines.fsdp.attention import VisibleKeys, attend_by_kernel, attend_by_row, packed_attention

pytestmark = pytest.mark.torch
BOUNDS = [0, 5, 69, 70, 128]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: the kernel runs on one only")
@pytest.mark.parametrize("forks", [None, (-1, 4, 40, -1)], ids=["apart", "shared"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("kv_heads", "of_values"), [(8, 64), (2, 64), (8, 48)])
def test_the_kernel_gives_what_rows_alone_give(
    kv_heads: int, of_values: int, window: int | None, forks: tuple[int, ...] | None
) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    seen = VisibleKeys.of(bounds, bounds.diff().cpu(), None if forks is None else torch.tensor(forks))
    shapes = ((8, 64), (kv_heads, 64), (kv_heads, of_values))
    parts = [torch.randn(1, heads, 128, size, device="cuda", dtype=torch.bfloat16) for heads, size in shapes]
    factors = torch.randn(1, 8, 128, of_values, device="cuda")
    results = []
    for attend in (attend_by_kernel, attend_by_row):
        inputs = [one.clone().requires_grad_() for one in parts]
        query, key, value = inputs
        found = attend(query, seen.of_runs(key), seen.of_runs(value), seen, scaling=0.125, window=window)
        (found.float() * factors).sum().backward()
        results.append([found, *(one.grad for one in inputs)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine.float(), expected.float(), atol=3e-2, rtol=3e-2)


def flash(query: Any, key: Any, value: Any, queries: Any, keys: Any, *longest: int, **given: Any) -> Any:
    """Refuses what `mha_varlen_fwd` in torch's flash_api.cpp refuses; all [L, heads, D]."""
    heads, size = query.shape[1:]
    assert size <= 256
    assert size % 8 == 0
    assert key.shape[2] == value.shape[2] == size
    assert heads % key.shape[1] == 0
    assert all(one.is_contiguous() and one.dtype == torch.bfloat16 for one in (query, key, value))
    assert queries.dtype == keys.dtype == torch.int32
    seen = VisibleKeys(queries, keys, queries.diff().tolist(), keys.diff().tolist())
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    return attend_by_row(*parts, seen, scaling=given["scale"], window=None)[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("size", "of_values", "by_kernel"),
    [(64, 64, True), (24, 16, True), (20, 12, True), (16, 24, True), (256, 256, True), (264, 264, False)],
    ids=["as usual", "DeepSeek-V3", "no multiples of 8", "larger values", "the largest", "Gemma 4"],
)
def test_heads_of_any_size_are_what_the_kernel_takes(
    size: int, of_values: int, *, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def kernel(*args: Any, **given: Any) -> Any:
        called.append(1)
        return flash(*args, **given)

    torch.manual_seed(0)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    query, key = (torch.randn(1, heads, 128, size, dtype=torch.bfloat16) for heads in (4, 2))
    value = torch.randn(1, 2, 128, of_values, dtype=torch.bfloat16, requires_grad=True)
    rows = [
        scaled_dot_product_attention(
            *(part[:, :, start:end] for part in (query, key, value)), is_causal=True, enable_gqa=True
        )
        for start, end in pairwise(BOUNDS)
    ]
    expected = torch.cat(rows, dim=2).transpose(1, 2)
    (slope,) = torch.autograd.grad(expected.float().square().sum(), value)
    monkeypatch.setattr("penstock.trainer.engines.fsdp.attention.KERNEL", kernel)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None, cu_seq_lens_q=bounds)
    monkeypatch.undo()
    assert bool(called) == by_kernel
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(torch.autograd.grad(found.float().square().sum(), value)[0], slope, atol=1e-1, rtol=5e-2)
