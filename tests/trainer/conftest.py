"""Makes the folder's helpers importable, also for the programs that torchrun starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks.support: what memory is, is measured in one place


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True, tie_word_embeddings=True)


@pytest.fixture
def ranks():
    """A process group of this process alone."""
    from penstock.trainer import Ranks

    opened = Ranks.open(timeout_s=30)
    yield opened
    opened.close()
