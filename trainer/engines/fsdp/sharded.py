"""FSDP2: a module's weights, and if it learns AdamW's moments, in shards over a device mesh (`mesh`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.trainer.config import AdamSettings, TrainerConfig
from penstock.trainer.engine import Update
from penstock.trainer.engines.fsdp import attention
from penstock.trainer.engines.fsdp.activation_offload import offload_activations
from penstock.trainer.engines.fsdp.experts import split_experts
from penstock.trainer.engines.fsdp.host_states import HostAdamW, moments_bytes, on_this_rank
from penstock.trainer.engines.fsdp.mesh import mesh_of
from penstock.trainer.engines.fsdp.recompute import recomputed
from penstock.trainer.engines.fsdp.shell import ModelShell, local_part
from penstock.trainer.engines.fsdp.tensor_parallel import CannotSplitModel, split_over
from penstock.trainer.job import BadJob
from penstock.trainer.packing import Pack, empty_pack
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.ranks.layout import RankLayout
from penstock.trainer.ranks.preemption import Preemption


class ShardedModule:
    """A module that takes packs. Every method is a collective over the ranks."""

    def __init__(self, module: nn.Module, config: TrainerConfig, ranks: Ranks) -> None:
        self.module = _shard(module, config, ranks)
        self._mesh = ranks.own(mesh_of)
        self._adds_shards = config.offload is True or self._mesh.replicate > 1
        """Gradients of packs are added before they are reduced between sets of shards."""
        self._ranks = ranks
        self._preemption = ranks.own(Preemption)
        self._has_run = False

    @torch.no_grad()
    def score(self, packs: Sequence[Pack]) -> list[Any]:
        """Return the module's outputs for each pack, without gradient."""
        try:
            return [self._run(pack.to(self._ranks.device)) for pack, _ in self._in_step(packs)][: len(packs)]
        finally:
            self.reshard()

    def _run(self, pack: Pack) -> Any:
        self._has_run = True
        return self.module(pack)

    def reshard(self) -> None:
        """Leave all forwards and backwards, also one that has failed: FSDP would stay in the middle of it, and the next
        one compute other numbers without an error.

        Masters are readable again: a forward leaves weights that are gathered in the type that it computed in. FSDP
        also notes each forward until there is a backward, for ever in a module that is only scored.
        """
        if self._has_run and isinstance(self.module, FSDPModule):
            self.module.reset_iter_state()

    def states(self) -> Iterator[Tensor]:
        """Yield the tensors that stay in memory between steps."""
        yield from self.module.parameters()

    def freeze(self) -> ShardedModule:
        self.module.requires_grad_(False)
        return self

    def _in_step(self, packs: Sequence[Pack]) -> Iterator[tuple[Pack, bool]]:
        """Each pack, and whether it is the last. As many on every rank: each forward and backward is a collective.
        Between two of them the step may be given up: raises `StepAbandoned`."""
        count = int(self._ranks.max(len(packs)))
        for number, pack in enumerate((*packs, *(empty_pack() for _ in range(count - len(packs)))), 1):
            self._preemption.check()
            yield pack, number == count


class TrainableModule(ShardedModule):
    """A sharded module with an optimizer."""

    def __init__(self, module: nn.Module, config: TrainerConfig, ranks: Ranks) -> None:
        super().__init__(module, config, ranks)
        adamw = HostAdamW if config.offload == "optimizer" else torch.optim.AdamW
        self.optimizer = adamw(
            [one for one in self.module.parameters() if one.requires_grad],
            fused=True,  # one kernel for all shards; on CPUs torch would otherwise go through them in Python
        )

    def states(self) -> Iterator[Tensor]:
        yield from super().states()
        if isinstance(self.optimizer, HostAdamW):  # its moments are on no device
            return
        for state in self.optimizer.state.values():
            yield from (one for one in state.values() if isinstance(one, Tensor))

    @property
    def step_bytes(self) -> int:
        """Return the bytes of gradients and moments that are on the device at a time."""
        (group,) = self.optimizer.param_groups
        gradients = sum(on_this_rank(one).nbytes for one in group["params"])
        if isinstance(self.optimizer, HostAdamW):
            return gradients + self.optimizer.part_bytes
        on_device = on_this_rank(group["params"][0]).device.type == self._ranks.device.type
        return gradients + on_device * moments_bytes(group["params"])

    def restore(self, weights: dict[str, Any], moments: dict[str, Any], *, strict: bool = True) -> None:
        """Load the result of `get_state_dict` of such a module. `strict`: `weights` must have all of its weights."""
        for group in moments["param_groups"]:  # how the process that wrote them computed
            group |= {name: self.optimizer.defaults[name] for name in ("fused", "foreach")}
        options = StateDictOptions(strict=strict)
        set_state_dict(self.module, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)

    def accumulate(self, packs: Sequence[Pack], loss: Callable[[Pack, Any], Tensor], divisor: float) -> float:
        """Gradients of sum(loss) / `divisor` over all packs of all ranks; returns the loss over all ranks.

        A rank whose loss is not finite goes through every backward like the others: each is a collective. Where the
        step is given up or fails no gradient is left.
        """
        try:
            return self._accumulate(packs, loss, divisor)
        except BaseException:
            self.module.zero_grad(set_to_none=True)  # of weights that are gathered
            self.reshard()
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def _accumulate(self, packs: Sequence[Pack], loss: Callable[[Pack, Any], Tensor], divisor: float) -> float:
        summed = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for pack, is_last in self._in_step(packs):
            if self._adds_shards and isinstance(self.module, FSDPModule):
                # Between sets of shards, which may be on several machines, and to the host gradients go once per
                # update: until then their sum, in float32, is on the device.
                self.module.set_requires_all_reduce(is_last)
            moved = pack.to(self._ranks.device)
            total = loss(moved, self._run(moved))
            # FSDP2 averages gradients over the mesh's ranks; `divisor` counts all ranks, so the sum is wanted.
            (total * (self._mesh.size / divisor)).backward()
            summed += total.detach()
        self._preemption.check()
        self._preemption.weights_change()
        return self._ranks.data.sum(float(summed)) / divisor

    def step(self, adam: AdamSettings, loss: float) -> Update:
        """One optimizer update with the gradients that are there, unless `loss` or they are not finite."""
        grad_norm = self._clip(adam.max_grad_norm)
        # Both are sums over all ranks: every rank comes to the same decision.
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        if finite:
            for group in self.optimizer.param_groups:
                group |= {"lr": adam.lr, "betas": adam.betas, "eps": adam.eps, "weight_decay": adam.weight_decay}
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm, adam.lr, skipped=not finite, loss=loss)

    def _clip(self, largest: float) -> float:
        """Gradients are clipped to the norm `largest`, unless it is 0; returns their norm before. A collective."""
        learning = [one for one in self.module.parameters() if one.grad is not None]
        gradients = [one.grad for one in learning if one.grad is not None]
        by_mesh: dict[Any, list[Tensor]] = {}  # experts lie over one of their own; torch takes the norm over one
        for gradient in gradients:
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        norms = [nn.utils.get_total_norm(part) for part in by_mesh.values()]
        grad_norm = math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))
        if not largest:
            return grad_norm
        if self._mesh.replicate == 1 and len(norms) == 1:
            nn.utils.clip_grads_with_norm_(learning, largest, norms[0])
            return grad_norm
        # Each set of shards has summed it by itself, maybe in another order: clipped by another number, its weights
        # would no longer be the others'.
        grad_norm = self._ranks.max(grad_norm if math.isfinite(grad_norm) else math.inf)
        coefficient = min(1.0, largest / (grad_norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(coefficient)
        return grad_norm


def _shard(module: Any, config: TrainerConfig, ranks: Ranks) -> nn.Module:
    """Change the module in place, in this order: split over the tensor group, sharded, filled if the weights are still
    in files, compiled, recomputed in the backward, activations on the host."""
    mesh = ranks.own(mesh_of)
    shell: ModelShell | None = module.shell
    on_host = config.offload is True
    if not on_host and shell is None:
        module.to(ranks.device)
    if mesh.tensor is not None:
        split_over(module, mesh.tensor)
    experts = [] if mesh.expert is None else split_experts(module.model, mesh.expert)
    if mesh.context is not None:
        check_context(module, ranks.layout)
        module.context = mesh.context
    computed = getattr(torch, config.dtype)
    as_kept = {parameter.dtype for parameter in module.parameters()} == {computed}
    arguments: dict[str, Any] = {
        # FSDP2 adds up on the device what it is to reduce between sets of shards later, one set included; without sets
        # it would add each pack's gradients on the host.
        "mesh": mesh.sets if on_host else mesh.shards,
        # None: but for what lies outside of the blocks, whose backward begins at once and would gather it again.
        "reshard_after_forward": None if mesh.size > mesh.replicate else False,
        "mp_policy": MixedPrecisionPolicy(param_dtype=None if as_kept else computed, reduce_dtype=torch.float32),
    }
    if on_host:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    for one in experts:
        fully_shard(one, **{**arguments, "mesh": mesh.expert_sets if on_host else mesh.expert_shards})
        # They have the gradients of all E ranks' tokens already: as of all other weights, the mean is over all ranks.
        one.set_gradient_divide_factor(float(mesh.size))
        # gloo can only add. Alone in its mesh a rank has nothing to add, and FSDP2 would divide twice.
        one.set_force_sum_reduction_for_comms(ranks.device.type == "cpu" and mesh.expert_shards.size() > mesh.replicate)
    blocks = _blocks(module)
    for block in reversed(_without_shared(blocks, module)):  # those inside another block (Zamba 2) before it
        fully_shard(block, **arguments)
    fully_shard(module, **arguments)
    if shell is not None:
        shell.fill(module, ranks, torch.device("cpu") if on_host else ranks.device)
    for block in blocks:
        _prepare(block, config)
    if config.activation_offload:
        offload_activations(blocks, ranks.device)
    return module


def check_context(module: Any, layout: RankLayout) -> None:
    """Raises `CannotSplitModel` for a model with another attention, or with too few heads."""
    model = module.model
    used, heads = model.config._attn_implementation, model.config.get_text_config().num_attention_heads
    if used != attention.NAME:
        kinds = (type(part).__name__ for part in model.modules())
        layer = next((kind for kind in kinds if "Attention" in kind), type(model).__name__)
        because = module.rows.unpacked_because or f"its attention is {used}"
        raise CannotSplitModel(
            f"{layer} exchanges tokens between ranks in packed rows alone, and of {type(model).__name__} {because}: "
            "set trainer.parallel.context to 1"
        )
    if heads // layout.tensor % layout.context:
        raise CannotSplitModel(
            f"the model's {heads} heads over trainer.parallel.tensor={layout.tensor} ranks are no multiple of "
            f"trainer.parallel.context={layout.context}"
        )


def _prepare(block: Any, config: TrainerConfig) -> None:
    """The block's `forward` alone is wrapped: FSDP's hooks stay outside, and no parameter gets another name."""
    if config.compile:
        block.forward = torch.compile(block.forward, dynamic=True)
    if config.recompute:
        block.forward = recomputed(block.forward, config.recompute)


def _blocks(module: Any) -> list[Any]:
    """The decoder layers: the modules that the model itself says must not be split."""
    names = set(getattr(module.model, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]


def _without_shared(blocks: list[Any], module: nn.Module) -> list[Any]:
    """The blocks that share no parameter with another part of `module`: a shared one (Zamba 2) must be in one group of
    FSDP alone, that of the whole module."""
    parts = (part.named_parameters(remove_duplicate=False) for part in (module, *blocks))
    uses, *own = (Counter(parameter for _, parameter in named) for named in parts)
    return [block for block, mine in zip(blocks, own, strict=True) if mine.items() <= uses.items()]


def check_copies(modules: Sequence[nn.Module], ranks: Ranks) -> None:
    """Under HSDP, whether the sets of shards are copies of one another; a collective.

    Raises `BadJob` on all ranks where two hold other values of the same shard: with the same gradients these would
    differ for ever, and nothing else would say so.
    """
    replicate = ranks.layout.replicate
    if replicate == 1:
        return
    digests = [
        [name, _digest(local_part(parameter)[0])] for module in modules for name, parameter in module.named_parameters()
    ]
    gathered = ranks.gather(digests)
    each = ranks.world // replicate
    for rank in range(each, ranks.world):
        for (name, expected), (_, digest) in zip(gathered[rank % each], gathered[rank], strict=True):
            if digest != expected:
                raise BadJob(
                    f"trainer.parallel.replicate is {replicate}, and ranks {rank % each} and {rank}, which hold the "
                    f"same shard of {name}, have other values of it: the model's files are not the same on all "
                    "machines. Copy the folder to each anew"
                )


@torch.no_grad()
def _digest(local: Tensor) -> str:
    digest = xxhash.xxh3_64()
    for piece in local.reshape(-1).split(1 << 24):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
