"""The engine `fsdp`: the policy, and where the algorithm needs them a reference policy and a critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from penstock.rollout_server import context_length
from penstock.trainer.advantages import ADVANTAGES, needs_of
from penstock.trainer.batch import ModelLimits
from penstock.trainer.config import AdamSettings, TrainerConfig, adam_settings, learning_rate
from penstock.trainer.data.images import sees_images
from penstock.trainer.engine import Flops, PackLoss, RouterLoads, Update, ValueLoss
from penstock.trainer.engines.fsdp.flash_attention import use_flash
from penstock.trainer.engines.fsdp.host_states import HostStates, on_this_rank
from penstock.trainer.engines.fsdp.lora import gathered, merged, named_weights
from penstock.trainer.engines.fsdp.models import (
    Policy,
    load_critic,
    load_implicit,
    load_policy,
    load_reference,
)
from penstock.trainer.engines.fsdp.publishing import host_weight, local_shards
from penstock.trainer.engines.fsdp.saved_model import save_settings, save_tensors
from penstock.trainer.engines.fsdp.sharded import ShardedModule, TrainableModule, check_copies
from penstock.trainer.engines.fsdp.shell import local_part
from penstock.trainer.job import BadJob, no_replay
from penstock.trainer.packing import Pack, RowLayout
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.state.hashed_files import HashingWriter
from penstock.weight_sync import Shard


class FSDPEngine:
    """Any `AutoModelForCausalLM`, and models of images and text. One rank by default; more give the same numbers, up to
    rounding."""

    def __init__(
        self,
        model: str,
        config: TrainerConfig,
        ranks: Ranks,
        temperature: float = 1.0,
        *,
        routing_replay: bool = False,
    ) -> None:
        """`routing_replay`: the policy's tokens are read by the experts that packs name. Raises `BadJob` if they
        cannot be."""
        self.config = config = config.resolve_dtype(on_gpu=ranks.device.type == "cuda")
        self.temperature = temperature
        self._ranks = ranks
        if sees_images(model):
            refuse_beside_images(model, config)
        self.policy: Policy = load_policy(model, temperature, config, in_slices=True)
        if routing_replay and self.policy.routers is None:
            raise no_replay(self.policy.unrouted_because)
        settings, vision = self.policy.model.config.get_text_config(), self.policy.vision
        self.limits = ModelLimits(
            context_length(settings.to_dict()),
            settings.vocab_size,
            settings.hidden_size,
            self.policy.routers.mixtures if routing_replay and self.policy.routers else None,
            vision.image_token if vision else None,
        )
        self.flops = Flops.of(self.policy.model, learns_all=self.policy.adapter is None)
        use_flash(self.policy, getattr(torch, config.dtype), ranks.device)
        self._actor = TrainableModule(self.policy, config, ranks)
        if self.policy.routers is not None:
            self.policy.routers.count_load(ranks.device)
        self.reference: ShardedModule | None = None
        needs = needs_of(ADVANTAGES.get(config.advantage))
        if (config.kl.needs_reference or "implicit" in needs) and self.policy.adapter is None:
            self.reference = ShardedModule(load_reference(model, temperature, config), config, ranks).freeze()
        self.critic: TrainableModule | None = None
        if "values" in needs:
            self.critic = TrainableModule(load_critic(model, config, in_slices=True), config, ranks)
        elif "implicit" in needs:
            self.critic = TrainableModule(load_implicit(model, temperature, config), config, ranks)
        self.kl_coefficient = config.kl.in_reward
        self._modules: list[ShardedModule] = [one for one in (self._actor, self.reference, self.critic) if one]
        check_copies([one.module for one in self._modules], ranks)
        self._states = HostStates(lambda: [state for one in self._modules for state in one.states()], ranks.device)
        self._used = self._measured()
        """Bytes on a device that is a CPU, as of the last call that changed them much."""
        self._written: Future[Any] | None = None
        """The checkpoint that is being written from the states themselves."""

    @property
    def has_critic(self) -> bool:
        return self.critic is not None

    @property
    def shares_prefixes(self) -> bool:
        return not self.policy.unshared_because

    @property
    def row_layout(self) -> RowLayout:
        return self.policy.rows.layout

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._actor.optimizer

    def take_router_loads(self) -> RouterLoads | None:
        routers = self.policy.routers
        if routers is None:
            return None
        loads, context = routers.take_load(), self.policy.context
        if context is not None:  # each of its ranks has counted its own tokens
            for part in (one for load in loads for one in (load.chosen, load.probability, load.tokens)):
                dist.all_reduce(part, group=context.group)
        config = self.policy.model.config.get_text_config()
        return RouterLoads(loads, getattr(config, "router_aux_loss_coef", None) is not None)

    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        return [outputs.logprobs.cpu() for outputs in self._actor.score([pack.without_tops for pack in packs])]

    def score_reference(self, packs: Sequence[Pack]) -> list[Tensor]:
        if self.policy.adapter is not None:
            with self.policy.adapter.off():
                return self.score(packs)
        assert self.reference is not None
        return [outputs.logprobs.cpu() for outputs in self.reference.score(packs)]

    def values(self, packs: Sequence[Pack]) -> list[Tensor]:
        assert self.critic is not None
        return [values.cpu() for values in self.critic.score(packs)]

    def update(self, packs: Sequence[Pack], loss: PackLoss, divisor: float, step: int) -> Update:
        return self.step(
            adam_settings(self.config, learning_rate(self.config, step)), self.accumulate(packs, loss, divisor)
        )

    def accumulate(self, packs: Sequence[Pack], loss: PackLoss, divisor: float) -> float:
        """Add the gradients of sum(loss) / `divisor` over all packs of all ranks to those that are there; return that
        sum."""
        return self._accumulate(self._actor, packs, loss, divisor)

    def step(self, adam: AdamSettings, loss: float) -> Update:
        """One update with the gradients that are there, unless they or `loss` are not finite; none is left."""
        return self._step(self._actor, adam, loss)

    def update_critic(self, packs: Sequence[Pack], loss: ValueLoss, divisor: float) -> Update:
        assert self.critic is not None
        adam = adam_settings(self.config, self.config.critic.lr)
        return self._step(self.critic, adam, self._accumulate(self.critic, packs, loss, divisor))

    def _accumulate(
        self, module: TrainableModule, packs: Sequence[Pack], loss: Callable[[Pack, Any], Tensor], divisor: float
    ) -> float:
        summed = module.accumulate(packs, loss, divisor)
        self._used = self._measured()  # the most there is: the step that follows frees the gradients
        return summed

    def _step(self, module: TrainableModule, adam: AdamSettings, loss: float) -> Update:
        self._await_save()
        return module.step(adam, loss)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor, change in named_weights(self.policy.model, self.policy.adapter):
            whole = host_weight(tensor, change, dtype, self._ranks.rank)
            if whole is not None:
                yield from self.policy.names.split(name, whole)

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor, change in named_weights(self.policy.model, self.policy.adapter):
            yield from self.policy.names.split(name, merged(tensor, change))

    def local_shards(self, dtype: torch.dtype) -> list[Shard] | None:
        return local_shards(self.policy.model, self.policy.names, dtype, self._ranks.rank, self._ranks.world)

    @property
    def adapter_settings(self) -> dict[str, Any] | None:
        return self.policy.adapter.settings if self.policy.adapter else None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self.policy.adapter is not None
        for name, tensor in self.policy.adapter.tensors():
            full = gathered(tensor)
            if self._ranks.is_rank0:
                yield from self.policy.adapter.published(name, full.detach().to("cpu", torch.float32, copy=True))

    @property
    def state_bytes(self) -> int:
        trained = [self.policy, *([self.critic.module] if self.critic else [])]
        learning = [one for module in trained for one in module.parameters() if one.requires_grad]
        return sum(3 * local_part(one)[0].nbytes + 4 for one in learning)  # AdamW's step number: 4 bytes

    @property
    def turn_bytes(self) -> int:
        """See `SharingEngine`: weights, and of what learns gradients and moments, without those in host memory."""
        weights = [local_part(one)[0] for module in self._modules for one in module.module.parameters()]
        needed = sum(one.nbytes for one in weights if one.device.type == self._ranks.device.type)
        needed += sum(one.step_bytes for one in (self._actor, self.critic) if one)
        return max(needed, torch.cuda.max_memory_reserved()) if self._ranks.device.type == "cuda" else needed

    @property
    def used_bytes(self) -> int:
        """See `SharingEngine`. On CPUs as last measured: no tensor is read while another thread computes with it."""
        return torch.cuda.memory_reserved() if self._ranks.device.type == "cuda" else self._used

    def _measured(self) -> int:
        """Return the measured bytes. Called in the torch thread: elsewhere a gradient or a moment may be half made."""
        gradients = (one.grad for module in self._modules for one in module.module.parameters())
        return self._states.on_device + sum(on_this_rank(one).nbytes for one in gradients if one is not None)

    def leave_device(self) -> None:
        """See `SharingEngine`."""
        self._await_save()
        for module in self._modules:
            module.reshard()
        self._states.move_to_host()
        self._used = self._measured()
        if self._ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def enter_device(self) -> None:
        """See `SharingEngine`."""
        self._states.move_back()
        self._used = self._measured()

    def begin_save(self, path: Path) -> Future[Any]:
        """Under trainer.offload what is on the host is not copied: it is written from where it is, and the next update
        waits for that."""
        in_place = bool(self.config.offload)
        state = {**_model_state(self, on_host=in_place), f"rng_{self._ranks.rank}": torch.get_rng_state()}
        writer = HashingWriter(path, self._ranks.rank, copies=not in_place)
        future = dcp.async_save(state, storage_writer=writer, process_group=self._ranks.background)
        assert isinstance(future, Future)
        self._written = future if in_place else None
        return future

    def _await_save(self) -> None:
        """Return when the states may change; its owner reports a failed checkpoint. Raises `TimeoutError`."""
        if self._written is None:
            return
        timeout_s = self._ranks.saves_timeout_s
        if not wait((self._written,), timeout_s).done:
            raise TimeoutError(f"the checkpoint is not written after {timeout_s:.0f} s, and its states must not change")
        self._written = None

    def load(self, checkpoint: Path, written_by: int) -> None:
        state, rng = _model_state(self), f"rng_{self._ranks.rank}"
        existed = self._ranks.rank < written_by
        if existed:
            state[rng] = torch.get_rng_state()
        # Ranks may read for as long as they may write; the checkpoint is whole, so each reads what it needs.
        dcp.load(state, checkpoint_id=checkpoint, process_group=self._ranks.background)
        self._actor.restore(state["model"], state["optimizer"], strict=self.adapter_settings is None)
        self.kl_coefficient = float(state["kl_coefficient"])
        if self.critic is not None:
            self.critic.restore(state["critic"], state["critic_optimizer"])
        if existed:
            torch.set_rng_state(state[rng])

    def save_model(self, folder: Path) -> None:
        tensors = self.weights(torch.float32)
        if not self._ranks.is_rank0:
            for _ in tensors:  # each is a collective
                pass
            return
        save_tensors(tensors, folder)
        save_settings(self.policy.model, folder)

    def save_adapter(self, folder: Path) -> None:
        tensors = dict(self.adapter_weights())
        if self._ranks.is_rank0 and self.policy.adapter is not None:
            self.policy.adapter.save(folder, tensors)


def refuse_beside_images(model: str, config: TrainerConfig) -> None:
    """Raises `BadJob` for settings under which a model that sees images has not been shown to be exact."""
    settings = {
        "trainer.parallel.context": (config.parallel.context > 1, 1),
        "trainer.parallel.tensor": (config.parallel.tensor > 1, 1),
        "trainer.parallel.replicate": (config.parallel.replicate > 1, 1),
        "trainer.parallel.expert": (config.parallel.expert > 1, 1),
        "trainer.lora.rank": (config.lora.rank > 0, 0),
        "trainer.compile": (config.compile, "false"),
        "trainer.liger": (config.liger, "false"),
    }
    for key, (is_asked, plain) in settings.items():
        if is_asked:
            raise BadJob(f"{model} sees images, and {key} is not tried with them: set it to {plain}")


def _model_state(engine: FSDPEngine, *, on_host: bool = False) -> dict[str, Any]:
    """`on_host`: what is on a device is copied; what is on the host is given as it is either way."""
    options = StateDictOptions(cpu_offload=on_host)
    model, optimizer = _states_of(engine.policy, engine.optimizer, options)
    if engine.adapter_settings is not None:  # all but its matrices is in the run's model folder
        learning = {name for name, parameter in engine.policy.named_parameters() if parameter.requires_grad}
        model = {name: value for name, value in model.items() if name in learning}
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state["kl_coefficient"] = torch.tensor(engine.kl_coefficient, dtype=torch.float64)
    if engine.critic is not None:
        state["critic"], state["critic_optimizer"] = _states_of(engine.critic.module, engine.critic.optimizer, options)
    return state


def _states_of(
    module: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of both. Before the first update torch makes the moments by one with gradients of 0; it must
    not count as a step, or the first real one would be corrected as the second."""
    is_new = not optimizer.state
    states: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(module, optimizer, options=options)
    if is_new:
        for one in (*optimizer.state.values(), *states[1]["state"].values()):
            one["step"].zero_()
    return states
