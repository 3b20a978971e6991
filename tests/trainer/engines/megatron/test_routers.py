"""Routers of megatron-core, as far as they can be shown without it: which experts a layer is given, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.rollout_server import MixtureLayers, Mixtures, NoRouters
from penstock.trainer.batch import Row
from penstock.trainer.engines.megatron.inputs import rectangle
from penstock.trainer.engines.megatron.routing import StageRouters
from penstock.trainer.packing import join_rows

pytestmark = pytest.mark.torch

LAYERS = MixtureLayers(Mixtures(3, 8, 2), all_layers=4, with_experts=(0, 2, 3))


def layer_of(number: int, *, topk: int | None = 2, **config: Any) -> Any:
    """Layer `number`, from 1; `topk` None: without experts. Its forward answers with what its router would send on."""
    if topk is None:
        return SimpleNamespace(layer_number=number, mlp=SimpleNamespace(), forward=lambda **given: given)
    settings = SimpleNamespace(num_moe_experts=8, **config)
    router = SimpleNamespace(topk=topk, config=settings, router_replay=None)

    def forward(scores: Any, **given: Any) -> Any:
        plain = lambda values, k, groups, group_topk: torch.topk(values, k, dim=1)  # noqa: E731
        return (*router.router_replay.get_replay_topk(scores, 2, None, None, plain), given)

    return SimpleNamespace(layer_number=number, mlp=SimpleNamespace(router=router), forward=forward)


def routers_of(*layers: Any) -> StageRouters:
    decoder = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False), layers=list(layers))
    return StageRouters([SimpleNamespace(decoder=decoder)], LAYERS, torch.device("cpu"))


def test_a_layer_reads_its_own_column_of_the_record() -> None:
    """Of two rows on lines; the last token of each has no record, and what fills up the shorter one neither."""
    rows = []
    for number, length in enumerate((3, 2)):
        experts = np.array([[[token, 7], [token, 6], [token, 5]] for token in range(length)], dtype=np.uint8)
        experts[-1] = 0
        targets, nothing = np.arange(1, length), np.zeros(length - 1, dtype=np.int64)
        mask = np.ones(length - 1, dtype=np.bool_)
        ids = np.arange(length)
        rows.append(Row(number, ids, targets, nothing.astype(np.float32), nothing, mask, mask, nothing, None, experts))
    pack, (second, third) = join_rows(rows), (layer_of(3), layer_of(4))
    routers = routers_of(second, third)
    assert routers.columns == [1, 2]
    routing = routers.arguments(pack, rectangle(pack, 1))["extra_block_kwargs"]["attention_bias"]
    assert routing.real.tolist() == [True, True, True, True, True, False]  # position by position, line by line
    scores = torch.arange(8.0).expand(6, 8).clone().requires_grad_()
    for layer, expert in ((second, 6), (third, 5)):
        found, chosen, given = layer.forward(scores=scores, attention_bias=routing, attention_mask=None)
        assert chosen.tolist() == [[0, expert], [0, expert], [1, expert], [7, 6], [7, 6], [7, 6]]
        assert torch.equal(found, scores.gather(1, chosen))
        assert given == {"attention_mask": None}
        # The next call is not given these experts.
        assert layer.forward(scores=scores)[1].tolist() == [[7, 6]] * 6


def test_a_layer_without_experts_is_given_no_experts() -> None:
    dense = layer_of(2, topk=None)
    assert routers_of(layer_of(1), dense).columns == [0]
    assert dense.forward(attention_bias=object(), attention_mask=None) == {"attention_mask": None}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer_of(1), layer_of(2)], r"layers \[0, 1\] with experts, where the model's settings say \[0\]"),
        ([layer_of(3, topk=4)], "4 of 8 experts, where the model's settings say 2 of 8"),
        ([layer_of(3, moe_router_fusion=True)], "moe_router_fusion"),
        ([layer_of(3, moe_router_load_balancing_type="sinkhorn")], "moe_router_load_balancing_type"),
    ],
)
def test_routers_that_cannot_be_replayed_are_refused(layers: list[Any], message: str) -> None:
    with pytest.raises(NoRouters, match=message):
        routers_of(*layers)
