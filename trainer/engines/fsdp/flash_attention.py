"""Which kernels packed attention runs on a GPU: FlashAttention 3 if it is there and agreed in a trial, else torch's.

    offer    capability 9.0, a torch that lists FA3, the package `flash_attn_interface`, half precision, packed rows
    trial    this model's heads, head size and window: outputs and gradients compared with those of torch's own kernel
    then     it is this process's for good; in every other case torch's own stays, and the log says why

torch dispatches `varlen_attn` to what was activated, for the whole process: `scaled_dot_product_attention` too, which
is why models that see images, whose tower calls it with heads of another size, keep torch's own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from penstock.trainer.engine import head_sizes
from penstock.trainer.engines.fsdp import attention
from penstock.trainer.engines.fsdp.attention import HALF, VisibleKeys, attend_by_kernel
from penstock.trainer.engines.fsdp.models import Policy
from penstock.trainer.engines.fsdp.rows import RowPlan
from penstock.trainer.packing import RowLayout

logger = logging.getLogger(__name__)

IMPLEMENTATION, PACKAGE = "FA3", "flash_attn_interface"
CAPABILITY = (9, 0)
TOLERANCE = 0.02
"""Tolerance as a share of the norm: two kernels in bfloat16 round their products to 2⁻⁸ in another order."""
TRIED_LENGTHS, TRIED_FORKS = (70, 129, 1, 56), (-1, 60, 100, -1)
"""Runs that a kernel is tried on, of which one continues another, and one the second."""


def declined_because(
    *,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    packed: bool,
    sees_images: bool,
    one_head_size: bool,
    listed: bool,
    installed: bool,
    active: str | None,
) -> str:
    """Why no trial is worth it; empty if one is.

    Args:
        capability: of the device; None without a GPU.
        dtype: of the arithmetic.
        packed: rows go through packed attention.
        one_head_size: queries, keys and values of all layers have the head size that is tried.
        listed: torch knows how to activate FlashAttention 3.
        installed: its package can be found.
        active: what somebody else has activated in this process.
    """
    reasons = {
        "there is no GPU": capability is None,
        f"the arithmetic is {str(dtype).removeprefix('torch.')}": dtype not in HALF,
        "rows are not packed by our attention": not packed,
        "the model sees images": sees_images,
        "the model's heads are of several sizes": not one_head_size,
        f"{active} was activated before": active not in (None, IMPLEMENTATION),
        f"the device's capability is {capability}, not {CAPABILITY}": capability != CAPABILITY,
        f"torch {torch.__version__} does not list {IMPLEMENTATION}": not listed,
        f"the package {PACKAGE} is not installed": not installed,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def use_flash(policy: Policy, dtype: torch.dtype, device: torch.device) -> None:
    """Activates what is chosen for this model, and logs it. Kernels that fail in the trial are not taken."""
    if slow := row_loop_because(policy.rows, dtype, device):
        logger.warning(
            "attention goes through the rows of a pack one after the other, which is slow on a GPU: %s", slow
        )
        return
    declined = declined_because(
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=dtype,
        packed=policy.rows.layout is RowLayout.PACKED and policy.rows.attention == attention.NAME,
        sees_images=policy.vision is not None,
        one_head_size=_has_one_head_size(policy.model.config.get_text_config()),
        listed=IMPLEMENTATION in getattr(torch.nn.attention, "list_flash_attention_impls", list)(),
        installed=find_spec(PACKAGE) is not None,
        active=getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)(),
    ) or _tried(policy, dtype, device)
    if not declined:
        logger.info("attention kernel: %s, which agrees with torch's own", IMPLEMENTATION)
    else:
        level = logging.INFO if device.type == "cuda" else logging.DEBUG
        logger.log(level, "attention kernel: torch's own, not %s: %s", IMPLEMENTATION, declined)


def row_loop_because(rows: RowPlan, dtype: torch.dtype, device: torch.device) -> str:
    """Why packed rows have no kernel on this GPU, and what gives them one; empty if they have it."""
    if device.type != "cuda" or rows.layout is not RowLayout.PACKED or rows.attention != attention.NAME:
        return ""
    if dtype not in HALF:
        return f"trainer.dtype is {str(dtype).removeprefix('torch.')}; set trainer.dtype=bfloat16"
    if attention.KERNEL is None:
        return f"varlen_attn of torch {torch.__version__} has no grouped heads and windows; install torch 2.13 or newer"
    return ""


def _has_one_head_size(config: Any) -> bool:
    if not hasattr(config, "num_attention_heads"):
        return True
    # With these settings not all heads are of `head_dim`.
    others = ("qk_nope_head_dim", "v_head_dim", "global_head_dim", "swa_head_dim")
    return len(set(head_sizes(config))) == 1 and not any(getattr(config, name, None) for name in others)


def _tried(policy: Policy, dtype: torch.dtype, device: torch.device) -> str:
    """Leaves it activated if it agrees. It may be already, by another engine of this process."""
    config = policy.model.config.get_text_config()
    heads = config.num_attention_heads
    shape = Heads(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        head_sizes(config)[0],
        getattr(config, "sliding_window", None),
    )
    if torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()
    try:
        expected = attended(shape, dtype, device)
        torch.nn.attention.activate_flash_attention_impl(IMPLEMENTATION)
        because = difference(attended(shape, dtype, device), expected)
    except Exception as error:  # noqa: BLE001 - a package's kernels may raise anything
        because = f"it failed: {type(error).__name__}: {error}"
    if because and torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()
    return because


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's attention."""

    query: int
    key_value: int
    size: int
    window: int | None = None


def attended(shape: Heads, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """[output, gradients of queries, keys and values] of rows that are the same at every call, some of which share
    tokens; without the model's window and, if it has one, with it."""
    generator = torch.Generator().manual_seed(0)
    lengths, forks = torch.tensor(TRIED_LENGTHS), torch.tensor(TRIED_FORKS)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    seen, tensors = VisibleKeys.of(bounds, lengths, forks), []
    for window in dict.fromkeys((None, shape.window)):
        counts = (shape.query, shape.key_value, shape.key_value)
        drawn = [torch.randn(1, count, sum(TRIED_LENGTHS), shape.size, generator=generator) for count in counts]
        query, key, value = (one.to(device, dtype).requires_grad_() for one in drawn)
        output = attend_by_kernel(query, seen.of_runs(key), seen.of_runs(value), seen, scaling=None, window=window)
        weights = torch.randn(output.shape, generator=generator).to(device, dtype)
        tensors += [output.detach(), *torch.autograd.grad((output * weights).sum(), (query, key, value))]
    return tensors


def difference(actual: list[Tensor], expected: list[Tensor]) -> str:
    """Return the difference in words; empty if both are the same up to rounding."""
    for mine, own in zip(actual, expected, strict=True):
        apart = (mine.float() - own.float()).norm() / own.float().norm()
        if not float(apart) <= TOLERANCE:  # NaN fails as well
            return f"its results are {float(apart):.3g} of their norm away from torch's own"
    return ""
