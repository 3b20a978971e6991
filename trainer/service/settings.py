"""The trainer's settings that a service can have. Loads no torch."""

from __future__ import annotations

from penstock.trainer.config import TrainerConfig
from penstock.trainer.job import BadJob


def check_settings(config: TrainerConfig) -> None:
    """Raises `BadJob`."""
    for key, is_wrong, right in (
        ("trainer.engine", config.engine != "fsdp", "fsdp"),
        ("trainer.ranks", config.ranks != 1, "1"),
        ("trainer.lora.rank", config.lora.rank == 0, "the largest rank that clients may ask for, for instance 32"),
        ("trainer.lora.targets", "experts" in config.lora.names, "all-linear"),
        ("trainer.offload", bool(config.offload), "false"),
    ):
        if is_wrong:
            raise BadJob(f"`penstock serve` has LoRA adapters over one rank: set {key} to {right}")
