"""The cost of an archive to its run, and whether it holds each episode once, forked ones too, and gives the weights.

    penstock bench archive --json

A `penstock run` of the calculator trains and archives its steps, and `penstock replay` trains all of them again. Then
the run's batches are stored again here, by two sides in turn, on the disk that TMPDIR is on:

archive    as the trainer does: a file per step, and an index at each checkpoint
pickle     `pickle.dump` of a step's trajectories and fsync, as verl's `DataProto.save_to_disk` does

Another run forks its episodes at random turns while its workers are killed at random (`support/forked_run.py`).

Environment: PENSTOCK_BENCH_STEPS (20), PENSTOCK_BENCH_ROUNDS (3) and PENSTOCK_BENCH_GROUPS (8) of eight episodes.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa

from benchmarks.support.command import run_command
from benchmarks.support.comparison import in_turn
from benchmarks.support.forked_run import fork_figures
from benchmarks.support.learning_run import CALCULATOR
from benchmarks.support.measure import processor
from penstock.common import fsync_path
from penstock.transfer_queue import Archive, Trajectory, encode_trajectory

CHECKPOINT_EVERY = 10
Steps = Mapping[int, Sequence[Sequence[Trajectory]]]
"""Step → groups"""


def measure() -> dict[str, Any]:
    steps, rounds, groups = (_read(*one) for one in (("STEPS", 20), ("ROUNDS", 3), ("GROUPS", 8)))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        settings = ["name=archived", f"runs_dir={folder}", f"trainer.steps={steps}", f"groups_per_step={groups}"]
        settings += [f"trainer.checkpoint_every={CHECKPOINT_EVERY}", "data.eval=null"]
        run_cpu_s = run_command("archive", folder, "run", CALCULATOR, *settings)
        replay_cpu_s = run_command("archive", folder, "replay", str(folder / "archived"), "--from", "0")
        (replayed,) = (json.loads(file.read_text()) for file in folder.glob("archived/replays/*/replay.json"))
        batches = _batches(Archive(folder / "archived" / "archive"), steps)
        taken = _rounds({"archive": _store_archive, "pickle": _store_pickle}, batches, rounds, folder)
        accounts_percent = _accounts_percent(folder / "archived")
        own_bytes = _bytes_below(folder / "archived" / "archive")
        forks = fork_figures(folder, steps, seed=0)
    cpu_s = {side: median(seconds for seconds, _ in of) for side, of in taken.items()}
    nbytes = {side: of[0][1] for side, of in taken.items()}
    payload = _payload_bytes(batches)
    figures = {
        "replay_bit_equal": bool(replayed["weights_equal"]) and not replayed["steps_different"],
        "accounts_percent": accounts_percent,
        **forks,
        "run_cpu_s": round(run_cpu_s, 2),
        "replay_cpu_s": round(replay_cpu_s, 2),
        **{f"{side}_cpu_s": round(seconds, 4) for side, seconds in cpu_s.items()},
        **{f"{side}_bytes": count for side, count in {**nbytes, "run_archive": own_bytes, "payload": payload}.items()},
    }
    ratio = {
        "archive_cpu_over_run": cpu_s["archive"] / run_cpu_s,
        "archive_cpu_over_pickle": cpu_s["archive"] / cpu_s["pickle"],
        "archive_bytes_over_payload": own_bytes / payload,
        "archive_bytes_over_pickle": nbytes["archive"] / nbytes["pickle"],
        "replay_cpu_over_run": replay_cpu_s / run_cpu_s,
    }
    setup = {**processor(), "steps": steps, "rounds": rounds, "groups": groups, "checkpoint_every": CHECKPOINT_EVERY}
    return {
        "bench": "archive",
        "ratio": {key: round(value, 4) for key, value in ratio.items()},
        "figures": figures,
        "setup": setup,
    }


def _read(name: str, default: int) -> int:
    return int(os.environ.get(f"PENSTOCK_BENCH_{name}", default))


def _accounts_percent(run: Path) -> float:
    """Tokens of trained episodes in the accounts of cost, which servers reported, over those that the trainer had."""
    summary = json.loads((run / "summary.json").read_text())
    return round(100 * summary["accounts"]["tokens"]["trained"] / summary["tokens_sampled"], 2)


def _batches(archive: Archive, steps: int) -> Steps:
    batches: dict[int, list[list[Trajectory]]] = {}
    for step, groups in archive.batches(0, steps).items():
        episodes = archive.read(step, [name for group in groups for name in group])
        batches[step] = [[episodes[name] for name in group] for group in groups]
    return batches


def _rounds(
    sides: Mapping[str, Callable[[Steps, Path], None]], batches: Steps, rounds: int, folder: Path
) -> dict[str, list[tuple[float, int]]]:
    """(CPU seconds of this process, bytes on disk) of each side and round; the first round is not counted."""
    taken: dict[str, list[tuple[float, int]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in in_turn(list(sides), number):
            place = folder / f"{side}-{number}"
            began = time.process_time()
            sides[side](batches, place)
            took = time.process_time() - began
            if number:
                taken[side].append((took, _bytes_below(place)))
    return taken


def _store_archive(batches: Steps, folder: Path) -> None:
    archive = Archive(folder, "archived", 1 << 40)
    names = {step: [[one.episode_id for one in group] for group in groups] for step, groups in batches.items()}
    for step, groups in batches.items():
        archive.append(step, [one for group in groups for one in group])
        if (step + 1) % CHECKPOINT_EVERY == 0:
            archive.commit(step + 1, names)
    archive.commit(len(batches), names)


def _store_pickle(batches: Steps, folder: Path) -> None:
    folder.mkdir()
    for step, groups in batches.items():
        with (folder / f"{step}.pickle").open("wb") as file:
            pickle.dump(groups, file, pickle.HIGHEST_PROTOCOL)
            file.flush()
            os.fsync(file.fileno())
        fsync_path(folder)


def _payload_bytes(batches: Steps) -> int:
    """The queue's own bytes of each step's episodes, as one block of zstd."""
    codec = pa.Codec("zstd")
    joined = (b"".join(encode_trajectory(one) for group in groups for one in group) for groups in batches.values())
    return sum(len(codec.compress(block, asbytes=True)) for block in joined)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
