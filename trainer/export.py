"""Export to Hugging Face folders: from the running engine, or from a checkpoint on disk.

A folder that a run left is a model like any other: `model: runs/mine/final_model` starts from it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.trainer.config import TrainerConfig
from penstock.trainer.data.images import sees_images
from penstock.trainer.engine import Engine
from penstock.trainer.engines.fsdp.engine import FSDPEngine
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.state.checkpoint import failed_save, read_whole

TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


def save_final_model(engine: Engine, ranks: Ranks, source: str, folder: Path) -> None:
    """A Hugging Face folder with the tokenizer of `source`; written under a temporary name and renamed. A collective.

    What LoRA learned is added to the weights. Raises `CheckpointFailed`.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    if ranks.is_rank0:
        shutil.rmtree(temporary, ignore_errors=True)
    with _failure_named(temporary, ranks):
        engine.save_model(temporary)
        if ranks.is_rank0:
            _save_processors(source, temporary)
    if ranks.is_rank0:
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)


def save_final_adapter(engine: Engine, ranks: Ranks, folder: Path) -> None:
    """Write what LoRA learned, if it does, as a folder that peft loads. A collective. Raises `CheckpointFailed`."""
    if engine.adapter_settings is not None:
        with _failure_named(folder, ranks):
            engine.save_adapter(folder)


@contextmanager
def _failure_named(folder: Path, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors' are not OSErrors, those of tokenizers are no class of their own
        raise failed_save(folder, None, error, removes=ranks.is_rank0, what="model") from error


def _save_processors(source: str, folder: Path) -> None:
    """Write the tokenizer of `source`, and what makes pixels of images, into `folder`."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        logger.warning("model without tokenizer: %s has none (%s)", source, error)
    else:
        tokenizer.save_pretrained(folder)
    if sees_images(source):  # by whose settings pixels were made is part of the model: the file as the source has it
        for name in ("preprocessor_config.json", "processor_config.json"):
            settings_file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
            if settings_file:
                shutil.copyfile(settings_file, folder / name)


def export_checkpoint(checkpoint: Path, model: str, config: TrainerConfig, folder: Path) -> int:
    """`checkpoint` of a run that started from `model` as a Hugging Face folder, in one process, whatever number of
    ranks wrote it. Returns its step. Raises `OSError`, `ValueError` where the checkpoint is not whole, or another
    engine's; `CheckpointFailed` where `folder` cannot be written."""
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
        save_final_adapter(engine, ranks, folder / "adapter")
    finally:
        ranks.close()
    return info.step
