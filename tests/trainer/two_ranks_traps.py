"""What is silently wrong over gloo when done in the obvious way: checks for each of two ranks (`parallel_ranks`).

Every check compares with one process that has everything; a rank writes how far each was off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from trainer_support import one_pack
from transformers import AutoModelForCausalLM

from penstock.trainer import Ranks
from penstock.trainer.engines.fsdp.attention import VisibleKeys, packed_attention
from penstock.trainer.engines.fsdp.context import ContextGroup, Exchange
from penstock.trainer.engines.fsdp.mesh import Mesh
from penstock.trainer.engines.fsdp.tensor_parallel import plan_of, split_over
from penstock.trainer.logprobs import Head, token_logprobs
from penstock.trainer.ranks.layout import RankLayout


class Permuted(torch.autograd.Function):
    """The identity; its gradient is dense with permuted strides, as that of attention is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].transpose(1, 2).contiguous().transpose(1, 2)


def an_exchange_takes_a_permuted_gradient(context: ContextGroup) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    everything, factors = torch.randn(2, 2, 3, 4, 5), torch.randn(2, 2, 3, 4, 5)
    mine = everything[context.rank].clone().requires_grad_()
    received = Exchange.apply(mine, context.group)
    (Permuted.apply(received) * factors[context.rank]).sum().backward()
    # Piece c of rank r lands on rank c as its piece r.
    return [(received, everything[:, context.rank]), (mine.grad, factors[:, context.rank])]


def attention_over_shared_tokens(context: ContextGroup, kv_heads: int) -> list[tuple[Tensor, Tensor]]:
    """Runs that end inside a rank's part, and continue a run of another rank; keys and values of fewer heads than there
    are ranks are repeated.
    """
    torch.manual_seed(2)
    bounds, length = torch.tensor([0, 3, 11, 16], dtype=torch.int32), 8
    heads = (4, kv_heads, kv_heads)
    given = [torch.randn(1, n, 16, 6) for n in heads]
    factors = torch.randn(1, 16, 4, 6)
    own = slice(context.rank * length, (context.rank + 1) * length)
    whole = [x.clone().requires_grad_() for x in given]
    parts = [x[:, :, own].clone().requires_grad_() for x in given]
    module, seen = torch.nn.Identity(), VisibleKeys.of(bounds, bounds.diff(), torch.tensor([-1, 1, 7]))
    expected, _ = packed_attention(module, *whole, None, cu_seq_lens_q=bounds, seen=seen)
    (expected * factors).sum().backward()
    found, _ = packed_attention(module, *parts, None, cu_seq_lens_q=bounds, seen=seen, context=context)
    (found * factors[:, own]).sum().backward()
    pairs = [(part.grad, one.grad[:, :, own]) for part, one in zip(parts, whole, strict=True)]
    return [(found, expected[:, own]), *pairs]


def a_joined_result_has_each_ranks_own_gradient(context: ContextGroup) -> list[tuple[Tensor, Tensor]]:
    order = torch.tensor([4, 0, 1, 2, 3, 7, 6, 5])
    part = replace(context.part(one_pack(tokens=16, vocab=64)), counts=(3, 5), order=order)
    values, factors = torch.arange(8.0), torch.arange(8.0) + 1
    own = order[:3] if context.rank == 0 else order[3:]
    mine = values[own].clone().requires_grad_()
    joined = context.join(mine, part)
    (joined * factors).sum().backward()
    return [(joined, values), (mine.grad, factors[own])]


def parts_of_a_pack(context: ContextGroup) -> list[tuple[Tensor, Tensor]]:
    """A number of tokens that two ranks do not share evenly: the last part is filled up with a row of its own. Sampled
    tokens are in any order, as those of rows that share tokens are."""
    whole = one_pack(tokens=30, vocab=64)
    pack = replace(whole, ids=whole.ids[:-1], positions=whole.positions[:-1], row_bounds=torch.tensor([0, 15, 29]))
    pack = replace(pack, predictors=pack.predictors.flip(0), targets=pack.targets.flip(0), forks=torch.tensor([-1, 9]))
    pack = replace(pack, top_ids=torch.stack([pack.targets, pack.targets + 1], 1).int())
    part = context.part(pack)
    assert part.top_ids is not None
    assert part.forks is not None
    own = slice(context.rank * 15, context.rank * 15 + 15)
    filled = torch.cat([pack.ids, torch.zeros(1, dtype=torch.int64)])
    return [
        (part.ids, filled[own]),
        (part.row_bounds, torch.tensor([0, 15, 29, 30])),
        (part.forks, torch.tensor([-1, 9, -1])),
        (context.join(part.targets.float(), part), pack.targets.float()),
        (context.join(part.top_ids.float(), part), torch.stack([pack.targets, pack.targets + 1], 1).float()),
        (part.targets, whole.ids[part.predictors + own.start + 1]),
    ]


def a_head_in_two_parts(group: dist.ProcessGroup, rank: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    hidden, weight, targets = torch.randn(7, 6), torch.randn(20, 6), torch.randint(0, 20, (7,))
    factors, own = torch.randn(2, 7), slice(rank * 10, rank * 10 + 10)
    # Of the last token they are all of one rank's part.
    ids, of_coarse = torch.stack([torch.randperm(20)[:10] for _ in range(7)]), torch.randn(7, 11)
    ids[-1], ids[:3, 4] = torch.arange(10), -1
    results = []
    for rows, head in ((slice(0, 20), Head(0.8)), (own, Head(0.8, first=own.start, group=group))):
        h, w = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        logprobs, entropy, coarse = token_logprobs(h, w, None, targets, head, with_entropy=True, ids=ids)
        assert entropy is not None
        assert coarse is not None
        finite = coarse.masked_fill(coarse == -torch.inf, 0.0)
        ((logprobs * factors[0] + entropy * factors[1]).sum() + (finite * of_coarse).sum()).backward()
        results.append([logprobs, entropy, finite, (coarse == -torch.inf).float(), h.grad, w.grad])
    (*expected, of_weight), found = results
    return list(zip(found, [*expected, of_weight[own]], strict=True))


def a_model_in_two_parts(model: str, mesh: DeviceMesh) -> list[tuple[Tensor, Tensor]]:
    """Gradients of every weight; q_norm and k_norm see one rank's heads, and are in the plan."""

    class Owner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    one, two = Owner(), Owner()
    norms = [style for name, style in plan_of(two.model, 2).items() if name.endswith(("q_norm", "k_norm"))]
    assert norms == ["replicated_with_grad_allreduce"] * 4
    split_over(two, mesh)
    assert two.model.lm_head.weight is two.model.model.embed_tokens.weight, "tied before, tied after"
    ids = one_pack(tokens=30, vocab=64).ids[None]
    for owner in (one, two):
        owner.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = dict(one.named_parameters())
    return [(p.grad.full_tensor(), expected[name].grad) for name, p in two.named_parameters()]


def check(everyone: Ranks, folder: Path, model: str) -> None:
    meshes = [Mesh(layout, "cpu", everyone.timeout) for layout in (RankLayout(context=2), RankLayout(tensor=2))]
    context, tensor = meshes[0].context, meshes[1].tensor
    assert context is not None
    assert tensor is not None
    checks: dict[str, Callable[[], list[tuple[Tensor, Tensor]]]] = {
        "exchange": lambda: an_exchange_takes_a_permuted_gradient(context),
        "attention": lambda: attention_over_shared_tokens(context, 2),
        "attention with one head of keys": lambda: attention_over_shared_tokens(context, 1),
        "join": lambda: a_joined_result_has_each_ranks_own_gradient(context),
        "parts": lambda: parts_of_a_pack(context),
        "head": lambda: a_head_in_two_parts(context.group, context.rank),
        "model": lambda: a_model_in_two_parts(model, tensor),
    }
    lines = []
    for name, made in checks.items():
        # Every check's collectives are done before any of its results is looked at: ranks stay in step.
        pairs = made()
        errors = [float((found.detach() - expected.detach()).abs().max()) for found, expected in pairs]
        lines.append(f"{name}: {max(errors):.1e} {'ok' if max(errors) < 1e-5 else 'WRONG'}")
    (folder / f"checked_{everyone.rank}").write_text("\n".join(lines))
    for mesh in meshes:
        mesh.close()
