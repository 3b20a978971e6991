"""The newest whole checkpoint, found by all ranks together: each reads and compares its share of the files.

    rank 0       newest folder with a whole marker ──► its files and their checksums, to all ranks
    each rank    reads its share of the files, as many bytes as the others; compares
    all          what each found ──► one is damaged: rank 0 sets the checkpoint aside, and names the one before ⟲
                                 └─► none: that checkpoint

Every rank comes to the same verdict. The deadline is by the bytes of the largest share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.state.checkpoint import (
    CheckpointInfo,
    CheckpointStore,
    Fingerprint,
    damage_in,
    read_timeout_s,
)
from penstock.transfer_queue import DataCursor

REPORT_S = 60.0
"""A rank that is late says so itself, before the others give it up."""


class CheckpointNotRead(RuntimeError):
    """A rank has not read its share of a checkpoint in time. Raised on all ranks; the message names rank and share."""


def newest_whole(store: CheckpointStore, ranks: Ranks) -> CheckpointInfo | None:
    """A collective, in the thread that does the torch work. A damaged checkpoint is set aside by rank 0, with the file
    named in its log, and the one before is taken.

    Only rank 0's answer has the data cursor and the batches. Raises `CheckpointNotRead` on all ranks, `RuntimeError`
    where a rank is gone.
    """
    while True:
        marked = store.newest_marked() if ranks.is_rank0 else None
        about = None
        if marked is not None:
            info = marked.info
            about = {"name": info.path.name, "step": info.step, "ranks": info.ranks, "files": marked.files}
        named = ranks.from_rank0(about)
        if named is None:
            return None
        problem = _verdict(store.folder / named["name"], named["files"], ranks)
        if not problem:
            readable = CheckpointInfo(store.folder / named["name"], named["step"], DataCursor(), named["ranks"])
            return marked.info if marked is not None else readable
        if marked is not None:
            store.set_aside(marked.info.path, problem)


def shares_of(files: Mapping[str, Fingerprint], ranks: int) -> list[dict[str, Fingerprint]]:
    """Return the files by rank: every file once, the largest first to the rank that has the fewest bytes so far."""
    shares: list[dict[str, Fingerprint]] = [{} for _ in range(ranks)]
    sizes = [0] * ranks
    for name in sorted(files, key=lambda one: (-int(files[one]["bytes"]), one)):
        smallest = sizes.index(min(sizes))
        shares[smallest][name] = files[name]
        sizes[smallest] += int(files[name]["bytes"])
    return shares


def _verdict(path: Path, files: Mapping[str, Fingerprint], ranks: Ranks) -> str:
    """A collective: what is wrong with the checkpoint, or nothing; the same on all ranks."""
    shares = shares_of(files, ranks.world)
    sizes = [sum(int(one["bytes"]) for one in share.values()) for share in shares]
    timeout_s = read_timeout_s(max(sizes))
    mine, damage, late = shares[ranks.rank], "", ""
    try:
        damage = damage_in(path, mine, timeout_s)
    except TimeoutError:
        size = sizes[ranks.rank]
        late = f"rank {ranks.rank} has not read its {len(mine)} files, {size} bytes, within {timeout_s:.0f} s"
    ranks.meet(timeout_s + REPORT_S)
    reports = ranks.gather([damage, late])
    if too_late := "; ".join(late for _, late in reports if late):
        raise CheckpointNotRead(f"checkpoint {path}: {too_late}. Is its disk slower than 20 MB/s, or away?")
    return next((damage for damage, _ in reports if damage), "")
