"""A trial, before a run, of whether this engine can train a model: in a process that may crash or fill memory.

    try_model(model) ──► python -m penstock.trainer.engines.fsdp.trial MODEL ──► one line of JSON
                           small enough: loaded as a trainer loads it
                           else: a copy with random weights, one layer of each kind, thin MLPs, few experts and words

Attention keeps its widths in the copy; nothing else moves numbers from one row to another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

WHOLE_BYTES = 2 << 30
"""A model whose files are larger is tried as a copy."""
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Trial:
    refused: str = ""
    """Why the engine would not train this model; empty if it would."""
    skipped: str = ""
    """Why that could not be found out."""
    copied: bool = False
    """A copy was tried: nothing is known of the weights."""
    unpacked_because: str = ""
    """Why the engine would not pack this model's rows; empty if it would."""


def try_model(model: str) -> Trial:
    """`model`: a folder, or a hub's name, of which a copy is tried. Blocks for seconds, `TIMEOUT_S` at most."""
    command = [sys.executable, "-m", __name__, model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Trial(skipped=f"it was not loaded within {TIMEOUT_S:g} s")
    if done.returncode == 0:
        return Trial(**json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return Trial(skipped=f"loading it ended with exit status {done.returncode}: {last}")


def main(model: str) -> None:
    """The child's."""
    from penstock.trainer.job import BadJob

    files = [file for pattern in ("*.safetensors", "*.bin") for file in Path(model).glob(pattern)]
    copied = not Path(model).is_dir() or sum(file.stat().st_size for file in files) > WHOLE_BYTES
    try:
        if copied:
            trial = try_copy(model)
        else:
            from penstock.trainer.engines.fsdp.models import load_model

            trial = Trial(unpacked_because=load_model(model).traits.rows.unpacked_because)
    except BadJob as error:
        trial = Trial(refused=str(error), copied=copied)
    print(json.dumps(asdict(trial)))


def try_copy(model: str) -> Trial:
    """Raises `BadJob`. What fails by itself proves nothing about the model: the copy may be at fault."""
    from transformers import AutoConfig

    from penstock.trainer.engines.fsdp.rows import first_sentence
    from penstock.trainer.engines.fsdp.small_copy import NoCopy, small_copy
    from penstock.trainer.engines.fsdp.traits import find_traits

    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
        return Trial(skipped=f"no small copy of it can be made: {first_sentence(error)}", copied=True)
    try:
        rows = find_traits(small_copy(config)).rows
    except NoCopy as error:
        return Trial(skipped=str(error), copied=True)
    return Trial(copied=True, unpacked_because=rows.unpacked_because)


if __name__ == "__main__":
    main(sys.argv[1])
