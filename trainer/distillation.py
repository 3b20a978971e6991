"""On-policy distillation: the policy's own tokens, judged by a teacher one by one.

    d_n = logπ(n) − log p(n)        p: the teacher, given the same ids before token n; held within ±clip

    as advantage    A_n ← w · A_n − β · d_n         π at the start of the step; w = reward_weight, β = in_advantage
    as loss         L_n ← L_n + γ · ρ_n · k(d_n)    π under way; γ = in_loss, ρ the off-policy correction's weight,
                                                    k2 = d² / 2, whose gradient d · ∇logπ is that of the reverse KL

Over tokens that π sampled, d estimates the reverse KL(π ‖ p) at each context, and −d · ∇logπ its gradient with the
contexts held fixed: a token answers for itself alone (discount 0). Tokens without a teacher have d = 0.

Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes"
(arXiv:2306.13649), section 3; Gu et al. 2024, "MiniLLM: Knowledge Distillation of Large Language Models"
(arXiv:2306.08543), equation 2; as an advantage beside rewards: Lu et al. 2025, "On-Policy Distillation" (Thinking
Machines Lab). The teacher's logprobs are recorded with the trajectory, at temperature 1 (`Segment.teacher_logprobs`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.trainer.advantages import Advantages
from penstock.trainer.config import DistillConfig


def teacher_gap(logprobs: Tensor, teacher: Tensor, clip: float, *, keep_slope: bool = False) -> Tensor:
    """logprobs [n], teacher [n] with NaN where there is none → d [n], with the gradient of `logprobs`; 0 at NaN.

    Beyond ±clip the gradient is 0, with `keep_slope` that of `logprobs` still: under k2 a token that the teacher rules
    out is then unlearned with d = clip, as in the advantage. k3's slope would be e^clip there.
    """
    known = torch.where(teacher.isnan(), logprobs.detach(), teacher)
    gap = logprobs - known
    held = gap.clamp(-clip, clip)
    return gap + (held - gap).detach() if keep_slope else held


def mixed(advantages: Advantages, gap: Tensor, config: DistillConfig) -> Advantages:
    """gap [N] = d at the start of the step"""
    tokens = config.reward_weight * advantages.tokens - config.in_advantage * gap.double()
    return replace(advantages, tokens=tokens)
