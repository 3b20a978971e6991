"""Which GPUs of this machine each role of a run has: the trainer's ranks the first ones, servers those that follow.

8 GPUs, trainer.ranks=4, 2 servers split over 2 each:   trainer 0 1 2 3   rollout-0 4 5   rollout-1 6 7
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.plan import Role
from penstock.rollout_server import RolloutConfig

logger = logging.getLogger("penstock.run")
DRIVER = Path("/dev/nvidiactl")
VARIABLE = "CUDA_VISIBLE_DEVICES"
ASK_S = 60.0
"""A driver that nobody has used since the machine started takes its time."""
SPLIT_OVER = (
    ("tensor_parallel_size", "tp_size", "tp"),
    ("pipeline_parallel_size", "pp_size", "pp"),
)
"""What vLLM and SGLang call each way in which one server's model is split over GPUs."""


def has_gpu() -> bool:
    """An NVIDIA driver is here; asked without loading torch."""
    return DRIVER.exists()


def gpus_of_server(rollout: RolloutConfig) -> int:
    """GPUs that one rollout server computes on; 0: the `hf` engine computes on CPUs."""
    arguments: Mapping[str, Any] | None = {"vllm": rollout.vllm_args, "sglang": rollout.sglang_args}.get(rollout.engine)
    if arguments is None:
        return 0
    plain = {name.replace("-", "_"): value for name, value in arguments.items()}
    count = 1
    for names in SPLIT_OVER:
        count *= int(next((plain[name] for name in names if plain.get(name)), 1))
    return count


def visible_gpus() -> tuple[str, ...]:
    """As CUDA names them: those that CUDA_VISIBLE_DEVICES leaves us, else all that nvidia-smi lists."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        words = (word.strip() for word in named.split(","))
        return tuple(itertools.takewhile(lambda word: word not in ("", "-1"), words))  # CUDA reads no further either
    if not has_gpu():
        return ()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi does not say which GPUs there are (%s): roles share what each of them finds", error)
        return ()
    return tuple(done.stdout.split())


def gpus_of(role: Role, config: RunConfig, gpus: Sequence[str]) -> tuple[str, ...] | None:
    """The role's own of `gpus`. None: it is left with what its environment says, as agent workers and the page are.

    Where there are too few, servers begin again with the first: they share devices (`penstock doctor` warns of it).
    """
    ranks, each = config.trainer.ranks, gpus_of_server(config.rollout)
    if not gpus or (role.kind == "rollout" and not each):
        return None
    if role.kind == "trainer":
        return tuple(gpus[:ranks])
    if role.kind != "rollout":
        return None
    number = config.rollout.servers if role.number is None else role.number  # the evaluation server has none
    start = ranks + number * each
    return tuple(gpus[(start + i) % len(gpus)] for i in range(min(each, len(gpus))))
