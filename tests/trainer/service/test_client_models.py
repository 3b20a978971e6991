"""Models of several clients over one engine: each has the numbers that it would have alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mixtures import FAMILIES
from peft import PeftModel
from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from penstock.trainer import BadJob, Ranks, TrainerConfig
from penstock.trainer.config import AdamSettings
from penstock.trainer.service import BadRequestData, ClientModels, Datum, LossCall

pytestmark = pytest.mark.torch
CONFIG = TrainerConfig(dtype="float32", micro_batch_tokens=24, lora={"rank": 8, "alpha": 16.0})
NLL, ADAM = LossCall("cross_entropy", {}), AdamSettings(lr=1e-2, eps=1e-8)
RNG = np.random.default_rng(5)


def datum(tokens: int, width: int = 0, **inputs: Any) -> Datum:
    ids = RNG.integers(0, 60, tokens)
    targets = np.append(ids[1:], 7) if not width else RNG.integers(0, 60, (tokens, width))
    return Datum(ids, targets, {name: np.asarray(value, np.float32) for name, value in inputs.items()})


DATA = [datum(9), datum(17), datum(5, weights=RNG.normal(size=5)), datum(6, 3, weights=RNG.normal(size=(6, 3)))]


@pytest.fixture
def models(tiny_model: str, ranks: Ranks) -> ClientModels:
    return ClientModels(tiny_model, CONFIG, ranks)


def logprobs_of(model: Any, one: Datum) -> np.ndarray:
    with torch.no_grad():
        table = model(torch.from_numpy(one.ids)[None]).logits[0].float().log_softmax(-1)
    picked = table.gather(-1, torch.from_numpy(one.targets.reshape(len(one.ids), -1)))
    return picked.reshape(one.targets.shape).numpy()


def train(models: ClientModels, name: str, data: list[Datum], steps: int = 1) -> None:
    for _ in range(steps):
        for one in data:
            models.forward(name, [one], NLL, backward=True)
        models.step(name, ADAM)


def test_every_position_gets_the_logprob_of_its_targets_and_the_loss_is_their_sum(
    models: ClientModels, tiny_model: str, tmp_path: Path
) -> None:
    models.create("a", 4, seed=1)
    train(models, "a", DATA, steps=2)
    result = models.forward("a", DATA, NLL, backward=False)
    models.save("a", tmp_path / "a", with_optimizer=False)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "a")
    expected = [logprobs_of(plain, one) for one in DATA]
    for logprobs, other in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(logprobs, other, atol=2e-5)
    weights = [one.inputs.get("weights", 1.0) for one in DATA]
    assert result.loss == pytest.approx(-sum((w * lp).sum() for w, lp in zip(weights, expected, strict=True)), rel=1e-5)
    (prompt,) = models.score([DATA[1].ids], tmp_path / "a")
    np.testing.assert_allclose(prompt, expected[1][:-1], atol=2e-5)
    (of_base,) = models.score([DATA[1].ids], None)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    np.testing.assert_allclose(of_base, logprobs_of(base, DATA[1])[:-1], atol=2e-5)


def test_models_that_take_turns_are_those_that_are_alone(models: ClientModels, tmp_path: Path) -> None:
    for name, rank in (("a", 8), ("b", 3)):
        models.create(name, rank, seed=1)
    for one in DATA:  # in the middle of a's gradients b trains
        models.forward("a", [one], NLL, backward=True)
        train(models, "b", [one])
    models.step("a", ADAM)
    for name, rank in (("alone-a", 8), ("alone-b", 3)):
        models.create(name, rank, seed=1)
    train(models, "alone-a", DATA)
    for one in DATA:
        train(models, "alone-b", [one])
    for name in ("a", "b"):
        mine, alone = (models.forward(one, DATA, NLL, backward=False) for one in (name, f"alone-{name}"))
        assert mine.loss == alone.loss


def test_a_point_and_what_came_after_it_lead_to_the_same_bits(
    models: ClientModels, tiny_model: str, ranks: Ranks, tmp_path: Path
) -> None:
    models.create("a", 4, seed=1)
    train(models, "a", DATA)
    models.forward("a", DATA[:1], NLL, backward=True)
    models.write_point(tmp_path, 6, {"a": 1})
    restored = ClientModels(tiny_model, CONFIG, ranks)
    assert restored.read_point(tmp_path) == (6, {"a": 1})
    for each in (models, restored):
        each.forward("a", DATA[1:], NLL, backward=True)
        each.step("a", ADAM)
    mine, other = (each.forward("a", DATA, NLL, backward=False) for each in (models, restored))
    assert mine.loss == other.loss


def test_a_checkpoint_is_loaded_with_its_moments_or_without(models: ClientModels, tmp_path: Path) -> None:
    models.create("a", 4, seed=1)
    train(models, "a", DATA)
    models.save("a", tmp_path / "saved", with_optimizer=True)
    for name, with_optimizer in (("same", True), ("fresh", False)):
        models.load(name, tmp_path / "saved", with_optimizer=with_optimizer)
    for name in ("a", "same", "fresh"):
        train(models, name, DATA)
    a, same, fresh = (models.forward(name, DATA, NLL, backward=False).loss for name in ("a", "same", "fresh"))
    assert a == same
    assert a != fresh


def test_servers_get_an_adapter_under_the_names_of_the_models_files(ranks: Ranks, tmp_path: Path) -> None:
    """In those of Nemotron-H its modules have other names than in transformers."""
    model = save_tiny_model(tmp_path / "model", "NemotronH", **FAMILIES["NemotronH"])
    models = ClientModels(model, CONFIG, ranks)
    models.create("a", 4, seed=1)
    train(models, "a", DATA)
    models.save("a", tmp_path / "saved", with_optimizer=False)
    served, sha256 = models.write_served(tmp_path / "saved", tmp_path / "served")
    assert hashlib.sha256((served / "adapter_model.safetensors").read_bytes()).hexdigest() == sha256
    base, weights = load_file(Path(model) / "model.safetensors"), load_file(served / "adapter_model.safetensors")
    changed = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in weights}
    assert len(changed) == len(weights) // 2
    assert {f"{name}.weight" for name in changed} <= base.keys()
    settings = json.loads((served / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 16.0)


def test_a_damaged_checkpoint_fails_its_requests_alone(models: ClientModels, tmp_path: Path) -> None:
    models.create("a", 4, seed=1)
    models.save("a", tmp_path / "saved", with_optimizer=True)
    for file in (tmp_path / "saved").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])
    for use in (
        lambda: models.load("a", tmp_path / "saved", with_optimizer=True),
        lambda: models.score([DATA[0].ids], tmp_path / "saved"),
        lambda: models.write_served(tmp_path / "saved", tmp_path / "served"),
    ):
        with pytest.raises(BadRequestData, match="saved are damaged"):
            use()
    assert models.forward("a", DATA, NLL, backward=False).loss > 0


@pytest.mark.parametrize("backward", [False, True])
def test_a_request_that_fails_midway_leaves_weights_and_moments(
    tiny_model: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, *, backward: bool
) -> None:
    config = CONFIG.model_copy(update={"dtype": "bfloat16"})
    models, others = (ClientModels(tiny_model, config, ranks) for _ in "12")
    for each in (models, others):
        each.create("a", 4, seed=1)
        train(each, "a", DATA)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            if not backward:
                raise RuntimeError("out of memory")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise RuntimeError("out of memory")

    layer = models._engine.policy.model.model.layers[1].mlp
    with monkeypatch.context() as patch:
        plain = layer.forward
        patch.setattr(layer, "forward", lambda x: Failing.apply(plain(x)))
        with pytest.raises(RuntimeError, match="out of memory"):
            models.forward("a", DATA, NLL, backward=True)
    models.drop_gradients("a")
    for each in (models, others):
        train(each, "a", DATA)
    mine, other = (each.forward("a", DATA, NLL, backward=False) for each in (models, others))
    assert mine.loss == other.loss


def test_modules_that_a_model_leaves_out_stay_as_they_are(models: ClientModels, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    models.create("a", 4, seed=1, mlp=False)
    train(models, "a", DATA, steps=2)
    models.save("a", tmp_path, with_optimizer=False)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert all(bool(one.any()) == ("attn" in name) for name, one in weights.items())


@pytest.mark.parametrize(
    ("changed", "call", "what"),
    [
        ({"ids": np.array([1, 99_999])}, NLL, "model_input"),
        ({"targets": np.array([1, -1])}, NLL, "target_tokens"),
        ({"targets": np.array([1])}, NLL, "target_tokens"),
        ({"ids": np.zeros(0, np.int64)}, NLL, "0 tokens"),
        ({"inputs": {"weights": np.ones(3, np.float32)}}, NLL, "weights"),
        ({"inputs": {"weights": np.array([1, np.nan], np.float32)}}, NLL, "weights"),
        ({"inputs": {"strange": np.ones(2, np.float32)}}, NLL, "strange"),
        ({}, LossCall("ppo", {}), "lacks logprobs, advantages"),
        ({}, LossCall("cross_entropy", {"beta": 1.0}), "beta"),
        ({}, LossCall("stable_reinforce", {}), "loss_fn=importance_sampling"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_and_changes_nothing(
    models: ClientModels, changed: dict[str, Any], call: LossCall, what: str
) -> None:
    models.create("a", 4, seed=1)
    bad = replace(Datum(np.array([1, 2]), np.array([2, 3]), {}), **changed)
    with pytest.raises(BadRequestData, match=what):
        models.forward("a", [DATA[0], bad], call, backward=True)
    assert models.step("a", ADAM)["grad_norm"] == 0.0


def test_settings_that_cannot_serve_adapters_are_refused(tiny_model: str, ranks: Ranks) -> None:
    with pytest.raises(BadJob, match=r"trainer\.lora\.rank"):
        ClientModels(tiny_model, TrainerConfig(), ranks)
