"""A real peft model that is trained a few steps, to publish adapters of and to compare engines with."""

from __future__ import annotations

from typing import Any

import torch
from tests.rollout_server.precision import plain_greedy, plain_logprobs

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PeftPolicy:
    """LoRA on the model of `folder`; settings of ``LoraConfig`` as they are given."""

    def __init__(self, folder: str, **settings: Any) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(3)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = LoraConfig(**{"r": 8, "lora_alpha": 32, "target_modules": TARGETS, **settings})
        self.model = get_peft_model(base, config).eval()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=2e-2)

    def train(self, steps: int, seed: int) -> None:
        """On random ids: what it learns does not matter, only that every lora_A and lora_B changes."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            ids = torch.randint(512, (2, 32), generator=generator)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """As peft saves them, our own copies."""
        from peft import get_peft_model_state_dict

        return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(self.model).items()}

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.model.peft_config["default"].to_dict()
        return found

    def merged(self) -> dict[str, torch.Tensor]:
        """Every tensor of the model with the adapter in it, by peft's own merge, under the model folder's names."""
        self.model.merge_adapter()
        try:
            state = self.model.base_model.model.state_dict()
            kept = {name: tensor.clone() for name, tensor in state.items() if ".lora_" not in name}
        finally:
            self.model.unmerge_adapter()
        return {name.replace(".base_layer.", "."): tensor for name, tensor in kept.items()}

    def logprobs(self, context: list[int], sampled: list[int]) -> list[float]:
        """By the unmerged peft model."""
        return plain_logprobs(self.model, context, sampled)

    def greedy(self, context: list[int], count: int) -> list[int]:
        return plain_greedy(self.model, context, count)
