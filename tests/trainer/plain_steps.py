"""Steps of one rank by transformers' own forwards in float64, which ranks of `expert_ranks` are compared with."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_ranks import PROMPT, SETTINGS, routes_of, rows_of, trained_tokens
from safetensors.torch import load_file
from trainer_support import run_ranks
from transformers import AutoModelForCausalLM

from penstock.rollout_server import KEYWORD, NoRouters, Routers, Routing

STEPS = 3
NOISY = ("A_log", "dt_bias")
"""Parameters of Gated DeltaNet whose gradients are noisy in float32, whatever computes them."""


def launch(folder: Path, ranks: int, cases: dict[str, Any]) -> Path:
    run_ranks("expert_ranks.py", ranks, folder, json.dumps(cases))
    return folder


def plain(model: str) -> dict[str, Any]:
    """One rank's forward of each row alone, by transformers' eager attention and experts, in float64."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    mixtures = None
    with suppress(NoRouters):
        mixtures = Routers(policy).mixtures
        policy.set_experts_implementation("eager")
    settings = {"lr": SETTINGS["lr"], "eps": SETTINGS["eps"], "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(policy.parameters(), **settings)
    scored, gradients, norms = [], {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        summed = 0.0
        for ids in rows_of(step):
            arguments: dict[str, Any] = {"input_ids": torch.tensor([ids]), "use_cache": False}
            if mixtures is not None:
                arguments[KEYWORD] = Routing(torch.from_numpy(routes_of(ids, mixtures)).long())
            logits = policy(**arguments).logits[0, PROMPT - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, arguments["input_ids"][0, PROMPT:, None])[:, 0]
            (-logprobs.sum() / trained_tokens()).backward()
            summed += float(logprobs.detach().sum())
            scored += logprobs.tolist() if step == 0 else []
        gradients = gradients or {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), SETTINGS["max_grad_norm"])
        norms.append([-summed / trained_tokens(), float(norm)])
        optimizer.step()
    weights = {name: one.detach() for name, one in policy.named_parameters()}
    return {"scored": scored, "gradients": gradients, "weights": weights, "norms": norms}


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]


def assert_equal(expected: dict[str, Any], folder: Path) -> None:
    """Logprobs and gradients of the first step, losses and norms of each, weights after the last."""
    scored = [value for report in reports(folder) for pack in report["scored"] for value in pack]
    assert sorted(scored) == pytest.approx(sorted(expected["scored"]), abs=1e-5)
    later = tolerance_after_updates(expected["weights"])
    norms = json.loads((folder / "norms.json").read_text())
    assert norms == [pytest.approx(one, rel=later) for one in expected["norms"]]
    assert_close(load_file(folder / "gradients.safetensors"), expected["gradients"], 1e-5)
    assert_close(load_file(folder / "weights.safetensors"), expected["weights"], later)


def tolerance_after_updates(weights: dict[str, Any]) -> float:
    """As for `assert_close`: larger after an update that a noisy gradient went into."""
    return 2e-4 if any(name.endswith(NOISY) for name in weights) else 1e-5


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Each tensor to `tolerance` of the largest value of all."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        allowed = (10 if name.endswith(NOISY) else 1) * tolerance * largest
        assert float((found[name] - tensor).abs().max()) <= allowed, name
