"""A trial, before a run, of whether this engine can train a model: in a process that may crash or fill memory.

try_model(model) ──► python -m penstock.trainer.engines.fsdp.trial MODEL ──► one line of JSON
                       small enough: its weights are loaded as a trainer loads them
                       always: the engine updates a small copy of it (`small_copy`)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.trainer.ranks.distributed import Ranks

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
    # The child is a group of its own, whatever job this process is a rank of.
    env = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Trial(skipped=f"it was not loaded within {TIMEOUT_S:g} s")
    if done.returncode == 0:
        return Trial(**json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return Trial(skipped=f"loading it ended with exit status {done.returncode}: {last}")


def main(model: str) -> None:
    """Run the trial in the child process."""
    from penstock.trainer.job import BadJob
    from penstock.trainer.ranks.distributed import Ranks

    files = [file for pattern in ("*.safetensors", "*.bin") for file in Path(model).glob(pattern)]
    is_small = Path(model).is_dir() and sum(file.stat().st_size for file in files) <= WHOLE_BYTES
    ranks = Ranks.open(TIMEOUT_S)
    try:
        whole = try_weights(model) if is_small else None
        copied = try_copy(model, ranks)
        trial = whole or copied
    except BadJob as error:
        trial = Trial(refused=str(error), copied=not is_small)
    finally:
        ranks.close()
    print(json.dumps(asdict(trial)))


def try_weights(model: str) -> Trial:
    """The model itself, as a trainer loads it. Raises `BadJob`."""
    from penstock.trainer.engines.fsdp.models import load_model

    return Trial(unpacked_because=load_model(model).traits.rows.unpacked_because)


def try_copy(model: str, ranks: Ranks) -> Trial:
    """One update of a small copy, in the engine that a trainer starts. Raises `BadJob`, also where the engine fails by
    itself on a copy whose own forward runs."""
    import torch
    from transformers import AutoConfig

    from penstock.trainer.engines.fsdp.row_choice import first_sentence
    from penstock.trainer.engines.fsdp.small_copy import NoCopy, small_copy
    from penstock.trainer.job import BadJob

    try:
        copy = small_copy(AutoConfig.from_pretrained(model))
    except NoCopy as error:
        return Trial(skipped=str(error), copied=True)
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
        return Trial(skipped=f"no small copy of it can be made: {first_sentence(error)}", copied=True)
    folder = tempfile.mkdtemp()
    try:
        try:
            copy.save_pretrained(folder)
            AutoConfig.from_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - the copy's settings may contradict each other
            return Trial(skipped=f"its small copy cannot be saved and loaded: {first_sentence(error)}", copied=True)
        return Trial(copied=True, unpacked_because=_update_once(folder, ranks))
    except BadJob as error:
        raise BadJob(str(error).replace(folder, model)) from error
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        return Trial(skipped=f"there is no room to try its small copy: {first_sentence(error)}", copied=True)
    except Exception as error:
        cause = first_sentence(error)
        raise BadJob(f"{type(copy).__name__} cannot be trained by trainer.engine fsdp: {cause}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _update_once(model: str, ranks: Ranks) -> str:
    """Start the engine, update by a gradient of 0 and read what would be published. Returns why it would not pack the
    model's rows."""
    import torch

    from penstock.trainer.config import TrainerConfig
    from penstock.trainer.engines.fsdp.engine import FSDPEngine
    from penstock.trainer.packing import empty_pack

    engine = FSDPEngine(model, TrainerConfig(), ranks)
    engine.update([empty_pack()], lambda _, outputs: outputs.logprobs.sum(), 1.0, 0)
    for _ in engine.weights(torch.float32):
        pass
    return engine.policy.rows.unpacked_because


if __name__ == "__main__":
    main(sys.argv[1])
