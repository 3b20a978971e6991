"""A tiny mixture of experts whose routers' choices are known for every version of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rollout_server.conftest import VOCAB
from tests.tiny_model import save_tiny_model

from penstock.weight_sync import Manifest


class Mixture:
    """A tiny mixture of experts, other weights of its shape by version, and its routers' choices in plain passes."""

    def __init__(self, folder: Path, versions: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from penstock.rollout_server import Routers
        from penstock.rollout_server.engines.checkpoint import tensor_shapes
        from penstock.weight_sync import HubNames, WeightPublisher

        self.torch = torch
        self.folder = save_tiny_model(
            folder, "Qwen3Moe", vocab_size=VOCAB, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
        )
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._first = {name: one.clone() for name, one in self._model.named_parameters()}
        self._names = HubNames.of(self._model, tensor_shapes(self.folder))
        self._routers = Routers(self._model)
        self._publisher = WeightPublisher(versions, "shm", keep=8)

    def publish(self, version: int) -> Manifest:
        parts = [part for name, one in self._weights(version).items() for part in self._names.split(name, one)]
        return self._publisher.write(version, parts)

    def chosen(self, version: int, ids: list[int]) -> Any:
        """[T, layers, k]"""
        weights = self._weights(version)
        with self.torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
            with self._routers.recorded() as records:
                self._model(input_ids=self.torch.tensor([ids]), use_cache=False)
        return self._routers.rows(records)

    def _weights(self, version: int) -> dict[str, Any]:
        draw = self.torch.Generator().manual_seed(version)
        change = 0.05 if version else 0.0
        return {name: one + change * self.torch.randn(one.shape, generator=draw) for name, one in self._first.items()}
