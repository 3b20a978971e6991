"""Four ranks on gloo for each case, one of which goes wrong: watched_ranks.py FOLDER TIMEOUT_S CASE…

Each rank goes through the same collectives. In step `AT` rank `ODD` does what the case says. FOLDER/CASE then holds the
log of all ranks, the process number and the moment of the odd one's fault, and `ended.json`: how each rank ended, and
how long after the fault. All cases run at once: most of them wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.trainer import Ranks
from penstock.trainer.ranks.distributed import TorchThread
from penstock.trainer.ranks.watch import RankWatch

WORLD, ODD, STEPS, AT = 4, 2, 6, 3
PATIENCE_S = 600.0
"""Of the collectives: no case may end by them."""


def hang_in_torch_thread() -> None:
    threading.Event().wait()


def hash_for(seconds: float) -> None:
    """Work on the CPU in one call of Python after the other, as a compiler does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        hashlib.sha256(b"x" * 100_000).digest()


def fail() -> None:
    raise ValueError("an error of one rank")


FAULTS: dict[str, Callable[[float], None]] = {
    "stopped": lambda timeout_s: os.kill(os.getpid(), signal.SIGSTOP),
    "killed": lambda timeout_s: os.kill(os.getpid(), signal.SIGKILL),
    "stuck": lambda timeout_s: hang_in_torch_thread(),
    "slow": lambda timeout_s: hash_for(2.5 * timeout_s),
    "failed": lambda timeout_s: fail(),
    "loop": lambda timeout_s: None,
}


def step(ranks: Ranks, number: int, fault: Callable[[], None]) -> float:
    if number == AT and ranks.rank == ODD:
        fault()
    return ranks.sum(float(number))


async def live(folder: Path, case: str, timeout_s: float) -> None:
    in_torch = TorchThread(1)
    ranks = await in_torch(Ranks.open, PATIENCE_S)
    watch = await RankWatch.start(ranks, in_torch, timeout_s)

    def fault() -> None:
        (folder / "fault.json").write_text(json.dumps({"pid": os.getpid(), "at": time.time()}))
        FAULTS[case](timeout_s)

    try:
        for number in range(STEPS):
            assert await in_torch(step, ranks, number, fault) == WORLD * number
            if case == "loop" and number == AT and ranks.rank == ODD:
                hang_in_torch_thread()  # in the event loop's thread: no step follows, and no rank hears of it
    except BaseException as error:
        if watch is not None:
            watch.leave(type(error), error, None)
        raise
    finally:
        if watch is not None:
            await watch.close()
        ranks.close()
        in_torch.close()


def become(folder: Path, case: str, timeout_s: float, rank: int, address: dict[str, str]) -> None:
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        asyncio.run(live(folder, case, timeout_s))
        code = 0
    except Exception as error:  # noqa: BLE001 - told by the log and the exit code
        print(f"rank {rank} raised {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def main(folder: Path, timeout_s: float, cases: list[str]) -> None:
    running: dict[int, tuple[str, int]] = {}
    for case in cases:
        (folder / case).mkdir()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = str(taken.getsockname()[1])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD)}
        for rank in range(WORLD):
            pid = os.fork()
            if not pid:
                become(folder / case, case, timeout_s, rank, address)
            running[pid] = case, rank
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
