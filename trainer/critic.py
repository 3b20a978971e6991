"""The critic: the model's body with a head of one number, the value of the context before each sampled token.

    V_n = w · h(position before n)          w starts at 0: before it has learnt anything every value is 0

    L_n = max((V_n − G_n)², (clip(V_n, V_old − c, V_old + c) − G_n)²) / 2

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), equation 9; the clipped value loss
is that of OpenAI's implementation (Engstrom et al. 2020, "Implementation Matters in Deep RL", arXiv:2005.12729,
on value function clipping).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.trainer.config import TrainerConfig
from penstock.trainer.context import Context, whole
from penstock.trainer.packing import Pack
from penstock.trainer.policy import load_model, model_inputs, use_liger


class Critic(nn.Module):
    """Sharded as a whole, like the policy."""

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.model = body
        self.context: Context | None = None
        """As `Policy.context`."""
        self.head = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, pack: Pack) -> Tensor:
        """Values [N], float32, of the contexts before `pack.targets`."""
        part = self.context.part(pack) if self.context else whole(pack)
        hidden = self.model(**model_inputs(part, self.context)).last_hidden_state[0]
        # A sum over the one column: FSDP's hook on the output would be lost with a view.
        values = self.head(hidden[part.predictors]).float().sum(-1)
        return self.context.join(values, part.counts) if self.context else values


def load_critic(model: str, config: TrainerConfig) -> Critic:
    """float32 master weights, the body's from `model`, without dropout. The whole critic learns, also beside LoRA."""
    loaded = load_model(model)
    if config.liger:
        use_liger(loaded)
    return Critic(loaded.base_model, loaded.config.get_text_config().hidden_size)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """All [N] → [N]; only `values` carries a gradient."""
    near = torch.clamp(values, old - clip, old + clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
