"""SmolLM2-135M-Instruct, a pretrained model, learns to add: from 12 + 7 = 9 to 19. CPU only.

penstock model fetch smollm2-135m
penstock run recipes/smollm2/sums.py
penstock run recipes/smollm2/sums.py name=sums-lora trainer.lora.rank=16 trainer.lr=1e-3
"""

import random
import re

SETTINGS = {
    "model": "smollm2-135m",
    "max_staleness": "one_step_off",
    "groups_per_step": 8,
    "group_size": 8,
    "agent.workers": 1,
    "agent.max_new_tokens": 12,
    "agent.max_response_tokens": 12,
    "trainer.eval_every": 10,
    "rollout.max_model_len": 64,
    "trainer.steps": 30,
    "trainer.lr": 1e-5,
    "trainer.warmup_steps": 3,
    "trainer.micro_batch_tokens": 2048,
    "trainer.checkpoint_every": 10,
}

pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
random.Random(0).shuffle(pairs)
rows = [(f"What is {a} + {b}? Answer with the number only.", str(a + b)) for a, b in pairs]
TASKS, EVAL_TASKS = rows[100:], rows[:100]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 if the last number of the answer is the sum, and the answer ended by itself."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
