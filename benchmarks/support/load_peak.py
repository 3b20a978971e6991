"""The memory that ranks need to start: load_peak MODEL RANKS FOLDER; each leaves FOLDER/peak_RANK.json.

Counted from a process that has imported everything and started once with a tiny model, in its first group of ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.support.forked_ranks import forked_ranks
from benchmarks.support.model import SIZES, save_model
from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine, local_part


def resident() -> dict[str, int]:
    """{"VmRSS", "VmHWM"} in bytes."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0][:-1]: int(line[1]) << 10 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def start(model: str, ranks: Ranks) -> FSDPEngine:
    return FSDPEngine(model, TrainerConfig(ranks=ranks.world), ranks)


def measure(model: str, warm: str, ranks: Ranks) -> dict[str, Any]:
    start(warm, ranks)
    ranks.max(0.0)
    before = resident()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    engine = start(model, ranks)
    peak, after = resident()["VmHWM"], resident()["VmRSS"]
    shard = sum(local_part(one)[0].nbytes for one in engine.policy.parameters())
    return {"shard_bytes": shard, "peak_bytes": peak - before, "held_bytes": after - before}


def main(model: str, count: int, folder: Path) -> None:
    save_model(SIZES["tiny"], folder / "warm", "float32")
    with forked_ranks(count, folder) as ranks:
        found = measure(model, str(folder / "warm"), ranks)
        (folder / f"peak_{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
