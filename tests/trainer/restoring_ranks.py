"""Four ranks on gloo look for the newest whole checkpoint: restoring_ranks.py FOLDER CASE…

Each case has its own ranks and FOLDER/CASE, with checkpoints in it (`test_restore`). Every rank leaves in `found_RANK`
the step that it found or the error, and the files that it read; `ended.json` has how each process ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from forked_ranks import fork_ranks

from penstock.trainer import Ranks
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.trainer.state.restore import newest_whole

WORLD, ODD = 4, 2
DEADLINE_S = 3.0
"""To read a share, in the case `late`; of the collectives, in `slow writer`."""
WRITES_S = 8.0


def killed(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def late(path: Path) -> None:
    threading.Event().wait(4 * DEADLINE_S)


FAULTS: dict[str, Callable[[Path], None]] = {"killed": killed, "late": late}
"""What the rank `ODD` does when it reads its first file."""


class SlowWriter(dcp.FileSystemWriter):
    """One rank has more to write than the others."""

    def write_data(self, *arguments: Any) -> Any:
        if int(os.environ["RANK"]) == ODD:
            # Outlasts the collectives' deadline, which is the case; blocks the writing thread alone.
            time.sleep(WRITES_S)
        return super().write_data(*arguments)


def restore(folder: Path, case: str) -> dict[str, Any]:
    read: list[str] = []

    def reading(path: Path) -> Any:
        if case in FAULTS and int(os.environ["RANK"]) == ODD:
            FAULTS[case](path)
        read.append(f"{path.parent.name}/{path.name}")
        return {"bytes": path.stat().st_size, "xxh3": xxhash.xxh3_64_hexdigest(path.read_bytes())}

    ranks = Ranks.open(timeout_s=60.0)
    store = CheckpointStore(folder / "checkpoints", keep=2)
    if ranks.is_rank0:
        store.open()
    timeout_s = DEADLINE_S if case == "late" else 60.0
    with (
        patch("penstock.trainer.state.checkpoint.fingerprint", reading),
        patch("penstock.trainer.state.restore.read_timeout_s", lambda share_bytes: timeout_s),
    ):
        found = newest_whole(store, ranks)
    ranks.close()
    return {"step": found and found.step, "read": sorted(read), "damaged": store.damaged}


def save(folder: Path, case: str) -> dict[str, Any]:
    ranks = Ranks.open(timeout_s=DEADLINE_S)
    if case == "slow writer":
        ranks.await_saves(60.0)
    state = {f"of_{ranks.rank}": torch.ones(3)}
    writing = dcp.async_save(state, storage_writer=SlowWriter(folder / "saved"), process_group=ranks.background)
    writing.result(timeout=60)
    ranks.close()
    return {"step": 1}


def leave(folder: Path, case: str) -> None:
    try:
        said = (save if "writer" in case else restore)(folder, case)
    except Exception as error:  # noqa: BLE001 - how it ended is what the test asks
        said = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"found_{os.environ['RANK']}").write_text(json.dumps(said))


def main(folder: Path, cases: list[str]) -> None:
    for case in cases:
        (folder / case).mkdir(exist_ok=True)
        ranks = fork_ranks(WORLD, folder / case / "log", partial(leave, folder / case, case))
        ended = {ranks[pid]: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks}
        (folder / case / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
