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
from transformers import AutoModelForCausalLM

from penstock.trainer.attention import row_bounds_arguments, use_packed_attention
from penstock.trainer.packing import Pack


class Critic(nn.Module):
    """Sharded as a whole, like the policy."""

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.model = body
        self.head = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, pack: Pack) -> Tensor:
        """Values [N], float32, of the contexts before `pack.targets`."""
        arguments = row_bounds_arguments(pack.row_bounds)
        inputs = {"input_ids": pack.ids[None], "position_ids": pack.positions[None], "use_cache": False, **arguments}
        hidden = self.model(**inputs).last_hidden_state[0]
        # A sum over the one column: FSDP's hook on the output would be lost with a view.
        return self.head(hidden[pack.predictors]).float().sum(-1)


def load_critic(model: str) -> Critic:
    """float32 master weights, the body's from `model`, without dropout."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    use_packed_attention(loaded)
    return Critic(loaded.base_model, loaded.config.get_text_config().hidden_size)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """All [N] → [N]; only `values` carries a gradient."""
    near = torch.clamp(values, old - clip, old + clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
