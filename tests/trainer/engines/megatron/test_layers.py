"""Names of experts in megatron-core's own layers, as mbridge knows them."""

from __future__ import annotations

import pytest

from penstock.trainer.engines.megatron.bridge import grouped_name

EXPERTS = "decoder.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{EXPERTS}.local_experts.1.linear_fc1.weight", f"{EXPERTS}.linear_fc1.weight5"),
        (f"{EXPERTS}.local_experts.0.linear_fc2.weight", f"{EXPERTS}.linear_fc2.weight4"),
        ("decoder.layers.3.mlp.router.weight", "decoder.layers.3.mlp.router.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
    ],
)
def test_experts_are_named_as_in_a_grouped_layer(name: str, expected: str) -> None:
    assert grouped_name(name, first_expert=4) == expected
