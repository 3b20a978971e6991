"""Rows that share their beginnings in a tree of any shape give what transformers' own forwards of the rows give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.tiny_model import save_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.trainer import Pack, pack_rows
from penstock.trainer.batch import Row, number_tokens
from penstock.trainer.engines.fsdp import load_policy
from penstock.trainer.engines.fsdp.context import whole_part
from penstock.trainer.engines.fsdp.rows import run_rows

pytestmark = pytest.mark.torch
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("Qwen3", {}),
    "windows and capped scores": ("Gemma2", {"sliding_window": 9, "attn_logit_softcapping": 1.0}),
    "experts": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "states": (
        "Qwen3Next",
        {
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "mlp_only_layers": [0, 1]},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Draw rows that share prefixes: each continues a prefix of an earlier row. Equal rows and whole prefixes occur."""
    rows = [draw(st.lists(st.integers(1, 5), min_size=8, max_size=40))]
    for _ in range(draw(st.integers(1, 7))):
        earlier = draw(st.sampled_from(rows))
        fork = draw(st.integers(0, len(earlier)))
        own = draw(st.lists(st.integers(1, 5), min_size=0 if fork > 1 else 2, max_size=12))
        rows.append([*earlier[:fork], *own])
    return rows


def rows_of(tree: Sequence[Sequence[int]], seed: int) -> list[Row]:
    """Any tokens may be sampled ones, in shared parts too, and of one row and not of another."""
    draw, rows = np.random.default_rng(seed), []
    for episode, ids in enumerate(tree):
        targets = 1 + np.flatnonzero(draw.random(len(ids) - 1) < 0.4)
        nothing = np.zeros(len(targets), dtype=np.int64)
        on = np.ones(len(targets), dtype=np.bool_)
        behaviour = nothing.astype(np.float32)
        rows.append(Row(episode, np.array(ids), targets, behaviour, nothing, on, on, nothing))
    return number_tokens(rows)


def weights_of(rows: Sequence[Row]) -> list[Tensor]:
    """One for each sampled token, another one in each row."""
    return [torch.linspace(-1, 2, len(row.targets), dtype=torch.float64) + row.episode for row in rows]


@cache
def model_of(kind: str, folder: Path) -> str:
    name, changes = MODELS[kind]
    return save_tiny_model(folder / name, name, **changes)


@cache
def loaded(kind: str, folder: Path) -> tuple[Any, Any]:
    """(the policy, transformers' model), both in float64"""
    model = model_of(kind, folder)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    policy = load_policy(model, 1.0).double()
    if kind == "experts":  # products by groups know no float64
        policy.model.set_experts_implementation("eager")
        plain.set_experts_implementation("eager")
    return policy, plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def alone(plain: Any, rows: Sequence[Row]) -> tuple[Tensor, list[Tensor]]:
    """Logprobs of all sampled tokens in the order of rows, and the gradients of their weighted sum."""
    plain.zero_grad()
    logprobs = []
    for row in rows:
        ids = torch.from_numpy(row.ids)
        logits = plain(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        logprobs.append(logits[row.targets - 1, ids[row.targets]])
    return summed(plain, torch.cat(logprobs), torch.cat(weights_of(rows)))


def in_trees(policy: Any, rows: Sequence[Row], packs: Sequence[Pack]) -> tuple[Tensor, list[Tensor]]:
    policy.zero_grad()
    weights, logprobs = torch.cat(weights_of(rows)), []
    for pack in packs:
        logits = run_rows(lambda arguments: policy.model(**arguments).logits, whole_part(pack), policy.rows)
        logprobs.append(logits[pack.predictors].log_softmax(-1).gather(-1, pack.targets[:, None])[:, 0])
    order = torch.cat([pack.token for pack in packs])
    found, gradients = summed(policy.model, torch.cat(logprobs), weights[order])
    return found[order.argsort()], gradients


def summed(model: Any, logprobs: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
    (logprobs * weights).sum().backward()
    return logprobs.detach(), [one.grad.clone() for one in model.parameters()]


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=8)
@given(tree=trees(), seed=st.integers(0, 99), budget=st.sampled_from([20, 60, 10_000]))
def test_a_tree_gives_the_logprobs_and_gradients_of_rows_apart(
    kind: str, folder: Path, tree: list[list[int]], seed: int, budget: int
) -> None:
    rows = [row for row in rows_of(tree, seed) if len(row.targets)]
    if not rows:
        return
    policy, plain = loaded(kind, folder)
    assert not policy.unshared_because
    packs = pack_rows(rows, budget, share=True)
    expected, gradients = alone(plain, rows)
    found, mine = in_trees(policy, rows, packs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    largest = max(float(one.abs().max()) for one in gradients)
    for one, other in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * max(1.0, largest), rtol=0)


def test_every_shared_token_is_computed_once_however_deep_it_is() -> None:
    """A trunk, a branch, a branch of the branch, an equal row and a row that is the beginning of another."""
    trunk = [*range(1, 31)]
    tree = [trunk, [*trunk[:20], 40, 41], [*trunk[:20], 40, 42, 43], trunk, trunk[:25], [*trunk, 50]]
    rows = [row for row in rows_of(tree, 0) if len(row.targets)]
    (pack,) = pack_rows(rows, 1000, share=True)
    assert len(pack.ids) == len({tuple(ids[: end + 1]) for ids in tree for end in range(len(ids))}) == 30 + 2 + 2 + 1


def test_an_episode_whose_thinking_is_stripped_costs_little_more_than_its_last_row() -> None:
    """Twenty turns; each row has the history without thinking, and the thinking of its own turn."""
    draw = np.random.default_rng(0)
    history, tree = [*draw.integers(1, 60, 200)], []
    for _ in range(20):
        thinking, call, result = (draw.integers(1, 60, length) for length in (40, 24, 136))
        tree.append([*history, *thinking, *call])
        history += [*call, *result]
    rows = rows_of(tree, 0)
    (pack,) = pack_rows(rows, 10_000, share=True)
    assert sum(map(len, tree)) > 9 * max(map(len, tree))
    assert len(pack.ids) <= 1.5 * max(map(len, tree))
