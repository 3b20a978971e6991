"""Four ranks on gloo for each case, one of which goes wrong: beating_ranks.py FOLDER TIMEOUT_S CASE…

Each rank goes through the same collectives. In step `AT` the rank of the case does what the case says. FOLDER/CASE then
holds the log of all ranks, the process number and the moment of the fault, and `ended.json`: how each rank ended, and
how long after the fault. All cases run at once: most of them wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from forked_ranks import fork_ranks

from penstock.trainer import Ranks
from penstock.trainer.ranks.distributed import TorchThread
from penstock.trainer.ranks.heartbeat import Heartbeat

WORLD, STEPS, AT = 4, 6, 3
PATIENCE_S = 600.0
"""Of the collectives: no case may end by them."""


def fail() -> None:
    raise ValueError("an error of one rank")


FAULTS: dict[str, tuple[int, Callable[[float], object]]] = {
    "stopped": (2, lambda timeout_s: os.kill(os.getpid(), signal.SIGSTOP)),
    "first_stopped": (0, lambda timeout_s: os.kill(os.getpid(), signal.SIGSTOP)),
    "killed": (2, lambda timeout_s: os.kill(os.getpid(), signal.SIGKILL)),
    "first_killed": (0, lambda timeout_s: os.kill(os.getpid(), signal.SIGKILL)),
    "failed": (2, lambda timeout_s: fail()),
    "locked": (2, lambda timeout_s: ctypes.PyDLL(None).sleep(int(2 * timeout_s))),  # keeps Python's lock
}
"""Which rank does what."""


def step(ranks: Ranks, number: int, fault: Callable[[], None]) -> float:
    if number == AT:
        fault()
    return ranks.sum(float(number))


async def live(folder: Path, case: str, timeout_s: float) -> None:
    in_torch = TorchThread(1)
    ranks = await in_torch(Ranks.open, PATIENCE_S)
    heartbeat = await in_torch(Heartbeat.start, ranks, timeout_s, PATIENCE_S)
    assert heartbeat is not None
    odd, go_wrong = FAULTS[case]

    def fault() -> None:
        if ranks.rank == odd:
            (folder / "fault.json").write_text(json.dumps({"pid": os.getpid(), "at": time.time()}))
            go_wrong(timeout_s)

    try:
        for number in range(STEPS):
            assert await in_torch(step, ranks, number, fault) == WORLD * number
    except BaseException as error:
        heartbeat.leave(type(error), error, None)
        raise
    finally:
        await asyncio.to_thread(heartbeat.close)
        ranks.close()
        in_torch.close()


def run(folder: Path, case: str, timeout_s: float) -> None:
    asyncio.run(live(folder, case, timeout_s))


def main(folder: Path, timeout_s: float, cases: list[str]) -> None:
    running: dict[int, tuple[str, int]] = {}
    for case in cases:
        (folder / case).mkdir()
        work = partial(run, folder / case, case, timeout_s)
        ranks = fork_ranks(WORLD, folder / case / "log", work)
        running |= {pid: (case, rank) for pid, rank in ranks.items()}
    ended: dict[str, dict[int, tuple[int, float]]] = {case: {} for case in cases}
    while running:
        pid, status = os.wait()
        case, rank = running.pop(pid)
        at = json.loads(file.read_text())["at"] if (file := folder / case / "fault.json").exists() else time.time()
        ended[case][rank] = os.waitstatus_to_exitcode(status), time.time() - at
        (folder / case / "ended.json").write_text(json.dumps(ended[case]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
