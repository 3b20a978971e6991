"""verl's settings as the rules ask for them: what was given, else verl's default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.deploy.frameworks.table import Table

Setting = tuple[str, Any]
"""One of our keys and its value."""
V1_MODES = ("sync", "colocate_async", "separate_async")
PROGRAM, ONE_STEP_OFF = "--program", "one_step_off"
"""Key of the module that a script starts, where it is not verl's usual one; a part of such a module's name."""
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


class VerlSettings:
    """Values by dotted key, and what a rule notes about them."""

    def __init__(self, flat: Mapping[str, Any], table: Table) -> None:
        self._flat = flat
        self._table = table
        self.notes: list[str] = []
        self.lost: dict[str, str] = {}
        """Key → why its value has no counterpart."""
        self.unused: dict[str, str] = {}
        """Key → why verl does not read it with the others."""
        self.ours: dict[str, str] = {}
        """Key → the key here, where it is not that of the table."""

    def __getitem__(self, key: str) -> Any:
        return self._flat[key] if self.has(key) else self._table.default(key)

    def has(self, key: str) -> bool:
        return key in self._flat

    def first(self, *keys: str) -> Any:
        """Return the value of the first key that is set and not null; else the first such default."""
        values = [*(self._flat.get(key) for key in keys), *(self._table.default(key) for key in keys)]
        return next((value for value in values if value is not None), None)

    def matching(self, ending: str) -> Any:
        """Return the value of a key that ends so, in any section; None if there is none."""
        return next((value for key, value in self._flat.items() if key.endswith(ending)), None)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def lose(self, key: str, why: str) -> None:
        self.lost[key] = why

    def leave(self, key: str, why: str) -> None:
        self.unused[key] = why

    def name(self, key: str, ours: str) -> None:
        self.ours[key] = ours

    @property
    def is_async(self) -> bool:
        """Settings of fully_async_policy."""
        return any(key.startswith("async_training.") for key in self._flat)

    @property
    def mini_batch(self) -> int:
        return int(self[f"{ACTOR}.ppo_mini_batch_size"])

    @property
    def groups_per_step(self) -> int:
        if self.is_async:
            return self.mini_batch * int(self["async_training.require_batches"])
        return int(self["data.train_batch_size"])

    @property
    def response(self) -> int:
        return int(self.first(f"{ROLLOUT}.response_length", "data.max_response_length"))

    @property
    def v1_mode(self) -> str:
        """The mode of verl's V1 trainer, one of `V1_MODES`."""
        mode = str(self["trainer.v1.trainer_mode"])
        return mode if mode in V1_MODES else "sync"

    @property
    def context(self) -> int:
        """GPUs that share the tokens of a row: Ulysses, or context parallelism of Megatron."""
        parts = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
        return max(int(self[f"{ACTOR}.{part}"] or 1) for part in (*parts, "megatron.context_parallel_size"))

    @property
    def staleness(self) -> int:
        """The largest staleness in steps; 0 in a synchronous run.

        V1 drops a prompt group if its age in steps + 1 exceeds the threshold (its replay buffer). A step of V1 is
        parameter_sync_step updates and one publication, as one of trainer.minibatches is here.
        """
        if self.v1_mode != "sync":
            return max(0, int(self["trainer.v1.sampler.max_off_policy_threshold"]) - 1)
        if not self.is_async:
            return int(ONE_STEP_OFF in str(self[PROGRAM]))
        steps, share = (
            int(self["async_training.trigger_parameter_sync_step"]),
            self["async_training.staleness_threshold"],
        )
        return max(0, math.ceil(steps * (1 + float(share or 0.0))) - 1)
