"""Export to Hugging Face folders: from the running engine, or from a checkpoint on disk.

A folder that a run left is a model like any other: `model: runs/mine/final_model` starts from it.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from penstock.trainer.config import TrainerConfig
from penstock.trainer.data.images import sees_images
from penstock.trainer.engine import Engine
from penstock.trainer.engines.fsdp.engine import FSDPEngine
from penstock.trainer.ranks.distributed import Ranks

TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


def save_final_model(engine: Engine, ranks: Ranks, source: str, folder: Path, *, with_adapter: bool = True) -> None:
    """A Hugging Face folder with the tokenizer of `source`; written under a temporary name and renamed. A collective.

    What LoRA learned is added to the weights, unless not `with_adapter`.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    if ranks.is_rank0:
        shutil.rmtree(temporary, ignore_errors=True)
    engine.save_model(temporary, with_adapter=with_adapter)
    if not ranks.is_rank0:
        return
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    try:
        AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
    except (OSError, ValueError) as error:
        logger.warning("model without tokenizer: %s has none (%s)", source, error)
    if sees_images(source):  # by whose settings pixels were made is part of the model: the file as the source has it
        for name in ("preprocessor_config.json", "processor_config.json"):
            settings_file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
            if settings_file:
                shutil.copyfile(settings_file, temporary / name)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def export_checkpoint(checkpoint: Path, model: str, config: TrainerConfig, folder: Path) -> int:
    """`checkpoint` of a run that started from `model` as a Hugging Face folder, in one process, whatever number of
    ranks wrote it. Returns its step. Raises `OSError`, `ValueError` where the checkpoint is not whole, or another
    engine's."""
    from penstock.trainer.state.checkpoint import read_whole

    if config.engine != "fsdp":
        raise ValueError(f"the run's engine is {config.engine}: only checkpoints of the engine fsdp are read here")
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: name a folder that is not")
    config = config.anywhere()
    info = read_whole(checkpoint)
    ranks = Ranks.open(TIMEOUT_S)
    try:
        engine = FSDPEngine(model, config, ranks)
        engine.load(info.path, info.ranks)
        save_final_model(engine, ranks, model, folder)
        if engine.adapter_settings is not None:
            engine.save_adapter(folder / "adapter")
    finally:
        ranks.close()
    return info.step
