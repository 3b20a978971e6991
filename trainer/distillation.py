"""On-policy distillation: the policy's own tokens, judged by a teacher one by one.

From sampled tokens:

    d_n = logπ(n) − log p(n)        p: the teacher, given the same ids before token n; held within ±clip

    as advantage    A_n ← w · A_n − β · d_n         π at the start of the step; w = reward_weight, β = in_advantage
    as loss         L_n ← L_n + γ · ρ_n · k(d_n)    π under way; γ = in_loss, ρ the off-policy correction's weight,
                                                    k2 = d² / 2, whose gradient d · ∇logπ is that of the reverse KL

Over tokens that π sampled, d estimates the reverse KL(π ‖ p) at each context, and −d · ∇logπ its gradient with the
contexts held fixed: a token answers for itself alone (discount 0). Tokens without a teacher have d = 0.

From the teacher's k likeliest ids S_n in the place of token n, if it gives them, and one bucket for all other ids:

    p̃_n = (p(v) for v in S_n, 1 − Σ_S p)        π̃_n = (π(v) for v in S_n, Σ_v∉S π(v))
    as loss         L_n ← L_n + γ · D(π̃_n, p̃_n)

    reverse_kl      D = KL(π̃ ‖ p̃)
    forward_kl      D = KL(p̃ ‖ π̃)
    jsd             D = β · KL(p̃ ‖ m) + (1 − β) · KL(π̃ ‖ m)        m = β · p̃ + (1 − β) · π̃,   β = jsd_beta

Both are whole distributions over k + 1 buckets, so D is a divergence: 0 if they agree and never negative, at most
that over the whole vocabulary (log-sum inequality: Cover and Thomas, "Elements of Information Theory", theorem 2.7.1),
and equal to it where S is the vocabulary. k terms without the rest, which some take for it, are neither. D is already
the mean over all tokens in the place of n, so it is not weighed by ρ, the ratio of the one that was sampled; what the
correction masks is masked. `clip` does not apply: no single token decides. All k + 1 terms carry gradients.

Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes"
(arXiv:2306.13649), section 3, with its generalised JSD; the bucket for the rest as in TRL's distillation trainers, and
against truncation Anshumann et al. 2025, "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs"
(arXiv:2503.16870); Gu et al. 2024, "MiniLLM: Knowledge Distillation of Large Language Models"
(arXiv:2306.08543), equation 2; as an advantage in addition to rewards: Lu et al. 2025, "On-Policy Distillation"
(Thinking Machines Lab). The teacher's logprobs are recorded with the trajectory, at temperature 1
(`Segment.teacher_logprobs`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from penstock.trainer.advantages import Advantages
from penstock.trainer.config import DistillConfig

LEAST_REST = 1e-6
"""Smallest rest of a teacher: a smaller one is rounding of the k logprobs, and would invent a cost of the policy's
rest."""


def teacher_gap(logprobs: Tensor, teacher: Tensor, clip: float, *, keep_slope: bool = False) -> Tensor:
    """logprobs [n], teacher [n] with NaN if there is none → d [n], with the gradient of `logprobs`; 0 at NaN.

    Beyond ±clip the gradient is 0, with `keep_slope` that of `logprobs` still: under k2 a token that the teacher rules
    out is then unlearned with d = clip, as in the advantage. k3's slope would be e^clip there.
    """
    known = torch.where(teacher.isnan(), logprobs.detach(), teacher)
    gap = logprobs - known
    clipped = gap.clamp(-clip, clip)
    return gap + (clipped - gap).detach() if keep_slope else clipped


def mixed(advantages: Advantages, gap: Tensor, config: DistillConfig) -> Advantages:
    """gap [N] = d at the start of the step"""
    tokens = config.reward_weight * advantages.tokens - config.in_advantage * gap.double()
    return replace(advantages, tokens=tokens)


def teacher_coarse(ids: Tensor, logprobs: Tensor) -> Tensor:
    """ids [n, k], below 0 for none, logprobs [n, k] → log p̃ [n, k + 1], the rest last; −inf if there is no id."""
    there = ids >= 0
    rest = 1 - torch.where(there, logprobs.double().exp(), 0.0).sum(-1, keepdim=True)
    log_rest = rest.clamp(min=LEAST_REST).log().to(logprobs.dtype)
    return torch.cat([logprobs.masked_fill(~there, -math.inf), log_rest], 1)


def top_mass(coarse: Tensor) -> Tensor:
    """log π̃ or log p̃ [n, k + 1] → [n] what the k ids have of it"""
    return coarse[:, :-1].exp().sum(-1)


def coarse_divergence(student: Tensor, teacher: Tensor, config: DistillConfig) -> Tensor:
    """log π̃ and log p̃ [n, k + 1] → D [n]; the gradient is that of `student`.

    A bucket in which the student has nothing is left out: ids that are not there, and the rest of a whole vocabulary.
    """
    there = student != -math.inf
    student, teacher = student.masked_fill(~there, 0.0), teacher.masked_fill(~there, 0.0)
    if config.divergence == "reverse_kl":
        terms = _kl(student, teacher)
    elif config.divergence == "forward_kl":
        terms = _kl(teacher, student)
    else:
        beta = config.jsd_beta
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
        terms = beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
    return torch.where(there, terms, 0.0).sum(-1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return the KL by bucket. The last two parts add up to 0 over all buckets; with them no term is negative, but for
    rounding.
    """
    return log_a.exp() * (log_a - log_b) - log_a.exp() + log_b.exp()
