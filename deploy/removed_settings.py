"""Settings of earlier releases that no longer exist. A recipe that still has one is refused with a sentence that says
since when it is gone and what to do; `penstock.deploy.config` reads the table."""

from __future__ import annotations

SINCE_0_2: dict[str, str] = {
    "agent.server_tokens": "agent.server_requests bounds the load of a rollout server; delete the line",
    "data.curriculum.easy_above": "a row is easy from a pass rate of 0.9 on; delete the line",
    "data.curriculum.hard_below": "a row is hard up to a pass rate of 0.1; delete the line",
    "placement.hand_over_timeout_s": "the trainer waits 900 s for the engines' devices; delete the line",
    "restart_window_s": "a role's max_restarts count within an hour; delete the line",
    "sft.warmup_share": "the rate warms up over the first twentieth of the steps; delete the line",
    "stall_action": "a stalled run ends, --resume continues it, a larger stall_timeout_s waits longer; delete the line",
    "trainer.bad_batch_dumps": "the archive has every trained batch (penstock archive); delete the line",
    "transfer_queue.spill": "trained trajectories always wait on the trainer's disk; delete the line",
    "trainer.eval_timeout_s": "an evaluation of which no episode ends for half an hour is given up; delete the line",
    "trainer.share_prompts": "rows share what they begin with wherever that spares a tenth; delete the line",
    "sandbox.managed.call_timeout_s": "one request to a provider has 60 s; delete the line",
    "sandbox.managed.starts_at_once": "a process makes eight boxes of a provider at once; delete the line",
    "sandbox.server.max_calls": "calls with the run's own token are not limited; delete the line",
    "rollout.hedge_after_s": "a silent server is left at rollout.request_timeout_s; delete the line",
    "rollout.sidecar_processes": "one sidecar handles about 39,000 tokens/s per core; delete the line",
}
"""Dotted key of a setting that 0.2.0 removed, to what a user does instead: a sentence without a full stop."""

ELSEWHERE: dict[str, str] = {
    "learning_rate": "trainer.lr",
    "lrate": "trainer.lr",
    "max_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "max_grad_norm": "trainer.max_grad_norm",
    "gradient_clipping": "trainer.max_grad_norm",
    "batch_size": "groups_per_step",
    "train_batch_size": "groups_per_step",
    "num_generations": "group_size",
    "rollout_n": "group_size",
    "max_tokens": "agent.max_new_tokens",
    "max_completion_length": "agent.max_response_tokens",
    "max_prompt_length": "rollout.max_model_len",
    "kl_coef": "trainer.kl.in_loss",
    "max_off_policy_steps": "max_staleness",
    "reward_fn": "agent.reward",
}
"""Last part of a key that other frameworks have → the key that sets it here."""


def removed(key: str) -> str | None:
    """A sentence about the setting `key` (dotted), or None if no release had it.

    A key below a removed section counts: with `a.b` in the table, `a.b.c` is removed, too.
    """
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        advice = SINCE_0_2.get(".".join(parts[:length]))
        if advice is not None:
            return f"was removed in Penstock 0.2.0: {advice}"
    return None
