"""Nothing stays of a forward that is over or has failed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trainer_support import one_pack

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.ranks.preemption import Preemption, StepAbandoned

pytestmark = pytest.mark.torch


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
    """Those that a client of a service has added up."""
    engine, pack = FSDPEngine(tiny_model, TrainerConfig(), ranks), one_pack(60, vocab=64)
    engine.accumulate([pack], lambda pack, outputs: outputs.logprobs.sum(), 1.0)
    before = [one.grad.full_tensor().clone() for one in engine.policy.parameters()]

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.policy.model.model.layers[1].mlp, "forward", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.score([pack])
    after = [one.grad.full_tensor() for one in engine.policy.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
