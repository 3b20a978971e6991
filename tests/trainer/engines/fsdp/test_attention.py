"""The GPU's kernel for packed rows gives what the rows alone give."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from penstock.trainer.engines.fsdp.attention import VisibleKeys, attend_by_kernel, attend_by_row

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: the kernel runs on one only"),
]


@pytest.mark.parametrize("forks", [None, (-1, 4, 40, -1)], ids=["apart", "shared"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_kernel_gives_what_rows_alone_give(
    kv_heads: int, window: int | None, forks: tuple[int, ...] | None
) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 5, 69, 70, 128], dtype=torch.int32, device="cuda")
    seen = VisibleKeys.of(bounds, bounds.diff().cpu(), None if forks is None else torch.tensor(forks))
    given = [torch.randn(1, heads, 128, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, kv_heads, kv_heads)]
    factors = torch.randn(1, 8, 128, 64, device="cuda")
    results = []
    for attend in (attend_by_kernel, attend_by_row):
        inputs = [one.clone().requires_grad_() for one in given]
        query, key, value = inputs
        found = attend(query, seen.of_runs(key), seen.of_runs(value), seen, scaling=0.125, window=window)
        (found.float() * factors).sum().backward()
        results.append([found, *(one.grad for one in inputs)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine.float(), expected.float(), atol=3e-2, rtol=3e-2)
