"""FlashAttention 3 is taken where it is there and was seen to agree; stand-ins for the GPU, the package and kernels."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_model import save_tiny_model

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine, Policy, load_policy
from penstock.trainer.engines.fsdp.attention import VisibleKeys, attend_by_row
from penstock.trainer.engines.fsdp.flash_attention import (
    Heads,
    attended,
    declined_because,
    difference,
    use_flash,
)

pytestmark = pytest.mark.torch
INSIDE, PACKAGE = "penstock.trainer.engines.fsdp", "flash_attn_interface"
HOPPER: dict[str, Any] = {
    **{"capability": (9, 0), "dtype": torch.bfloat16, "packed": True, "sees_images": False, "one_head_size": True},
    **{"listed": True, "installed": True, "active": None},
}
DECLINED: dict[str, dict[str, Any]] = {
    "no GPU": {"capability": None},
    "float32": {"dtype": torch.float32},
    "not packed": {"packed": False},
    "sees images": {"sees_images": True},
    "FA4 was activated before": {"active": "FA4"},
    "heads are of several sizes": {"one_head_size": False},
    r"capability is \(10, 0\)": {"capability": (10, 0)},
    "does not list FA3": {"listed": False},
    "flash_attn_interface is not installed": {"installed": False},
}


@pytest.mark.parametrize(("because", "change"), DECLINED.items(), ids=DECLINED)
def test_what_is_not_there_is_not_tried(because: str, change: dict[str, Any]) -> None:
    assert re.search(because, declined_because(**HOPPER | change))
    assert declined_because(**HOPPER) == declined_because(**HOPPER | {"active": "FA3"}) == ""


class Torch:
    """`torch.nn.attention` of a machine that has FA3, whose kernel is `made`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: Callable[..., Any]) -> None:
        self.active: str | None = None
        self.tried: list[tuple[Any, Any]] = []
        self._made = made
        monkeypatch.setattr(f"{INSIDE}.attention.KERNEL", self._kernel)
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: self.active)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", self._activate)
        monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: self._activate(None))
        monkeypatch.setattr(f"{INSIDE}.flash_attention.declined_because", lambda **given: "")

    def _activate(self, name: str | None) -> None:
        self.active = name

    def _kernel(self, query: Any, key: Any, value: Any, queries: Any, keys: Any, *longest: int, **given: Any) -> Any:
        """[L, H, D] as torch's, by rows."""
        self.tried.append((tuple(query.shape), given["window_size"]))
        seen = VisibleKeys(queries, keys, queries.diff().tolist(), keys.diff().tolist())
        parts = (part.transpose(0, 1)[None] for part in (query, key, value))
        window = None if given["window_size"][0] < 0 else given["window_size"][0] + 1
        found = attend_by_row(*parts, seen, scaling=given["scale"], window=window)[0].transpose(0, 1)
        return self._made(found) if self.active == "FA3" else found


def fails(found: Any) -> Any:
    raise RuntimeError("no kernel image")


KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "agrees": (lambda found: found * 1.003, ""),
    "differs": (lambda found: found.roll(1, 0), "of their norm away"),
    "nan": (lambda found: found * torch.nan, "nan of their norm away"),
    "fails": (fails, "RuntimeError: no kernel image"),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(save_tiny_model(tmp_path_factory.mktemp("model"), "Mistral", sliding_window=48), 1.0)


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_that_does_not_agree_is_let_go(
    kind: str, policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, because = KERNELS[kind]
    there = Torch(monkeypatch, made)
    with caplog.at_level(logging.DEBUG, f"{INSIDE}.flash_attention"):
        use_flash(policy, torch.bfloat16, torch.device("cpu"))
    assert there.active == (None if because else "FA3")
    assert because in caplog.text
    assert ("torch's own, not FA3" in caplog.text) == bool(because)
    assert {shape[1:] for shape, _ in there.tried} == {(4, 8)}, "this model's heads"
    assert {window for _, window in there.tried} >= {(-1, 0), (47, 0)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")
@pytest.mark.parametrize("shape", [Heads(32, 8, 128), Heads(12, 2, 64, window=32), Heads(8, 8, 256)])
def test_on_a_gpu_it_agrees(shape: Any) -> None:
    device = torch.device("cuda")
    expected = attended(shape, torch.bfloat16, device)
    torch.nn.attention.activate_flash_attention_impl("FA3")
    try:
        assert difference(attended(shape, torch.bfloat16, device), expected) == ""
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_an_engine_says_which_kernel_it_takes(
    tiny_model: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", fails)
    with caplog.at_level(logging.DEBUG, f"{INSIDE}.flash_attention"):
        FSDPEngine(tiny_model, TrainerConfig(dtype="bfloat16"), ranks)
    assert "attention kernel: torch's own, not FA3: " in caplog.text


@pytest.mark.parametrize(
    ("dtype", "has_kernel", "words"),
    [
        (torch.float32, True, r"trainer\.dtype is float32; set trainer\.dtype=bfloat16"),
        (torch.bfloat16, False, r"varlen_attn of torch .*; install torch 2\.13 or newer"),
        (torch.bfloat16, True, None),
    ],
)
def test_rows_one_after_the_other_on_a_gpu_are_told_once_with_the_fix(
    tiny_model: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: Any,
    has_kernel: bool,
    words: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(f"{INSIDE}.attention.KERNEL", attend_by_row if has_kernel else None)
    use_flash(load_policy(tiny_model, 1.0), dtype, torch.device("cuda"))
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warned) == (words is not None)
    assert all(words and re.search(words, message) for message in warned)
