"""Calls of FSDP2: weights are gathered once per pack, and no state remains of a forward that has ended or failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_support import one_pack

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.ranks.preemption import Preemption, StepAbandoned

pytestmark = pytest.mark.torch


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A rank whose collectives go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, value])
    opened = Ranks(torch.device("cpu"), None)
    yield opened
    opened.close()


def test_weights_outside_of_the_layers_are_gathered_once_per_pack(
    tiny_model: str, one_of_two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FSDPEngine(tiny_model, TrainerConfig(), one_of_two)
    gathered: list[int] = []
    plain = DefaultAllGather.__call__

    def counted(self: Any, *args: Any, **given: Any) -> Any:
        gathered.append(1)
        return plain(self, *args, **given)

    monkeypatch.setattr(DefaultAllGather, "__call__", counted)
    pack, layers = one_pack(60, vocab=64), engine.policy.model.config.num_hidden_layers
    engine.accumulate([pack], lambda pack, outputs: outputs.logprobs.sum(), 1.0)
    assert len(gathered) == 1 + 2 * layers, "a layer's, for its forward and its backward"
    gathered.clear()
    engine.score([pack, pack])
    assert len(gathered) == 1 + 2 * layers


def test_scores_leave_nothing_behind(tiny_model: str, ranks: Ranks) -> None:
    """FSDP notes each forward for the backward, which a reference model never has."""
    engine = FSDPEngine(tiny_model, TrainerConfig(kl={"in_loss": 0.1}), ranks)
    assert engine.reference is not None
    engine.score_reference([one_pack(60, vocab=64)])
    state: Any = engine.reference.module._get_fsdp_state()
    assert state._comm_ctx.post_forward_order == []
    groups = [group for one in state._state_ctx.all_states for group in one._fsdp_param_groups]
    assert groups
    assert not any(group._post_forward_indices for group in groups)


def test_a_stop_before_the_first_forward_is_told_as_it_is(tiny_model: str, ranks: Ranks) -> None:
    engine, preemption = FSDPEngine(tiny_model, TrainerConfig(), ranks), ranks.own(Preemption)
    preemption.listen(lambda: True)
    for use in (
        engine.score,
        lambda packs: engine.accumulate(packs, lambda pack, outputs: outputs.logprobs.sum(), 1.0),
    ):
        preemption.begin_step()
        with pytest.raises(StepAbandoned):
            use([one_pack(60, vocab=64)])


def test_a_score_that_fails_leaves_the_gradients(
    tiny_model: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a service may have added up gradients before its score fails."""
    engine, pack = FSDPEngine(tiny_model, TrainerConfig(), ranks), one_pack(60, vocab=64)
    engine.accumulate([pack], lambda pack, outputs: outputs.logprobs.sum(), 1.0)
    before = [one.grad.full_tensor().clone() for one in engine.policy.parameters()]

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.policy.model.model.layers[0].mlp, "forward", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.score([pack])
    after = [one.grad.full_tensor() for one in engine.policy.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
