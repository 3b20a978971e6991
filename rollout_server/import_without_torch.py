"""Imports transformers without torch, for processes that need only tokenizers and configurations."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_TORCH, _TRANSFORMERS = "torch", "transformers"
_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Suppresses transformers' advice to install torch."""
_lock = threading.RLock()
_apart: dict[str, ModuleType] = {}


@contextmanager
def no_torch() -> Iterator[None]:
    """Inside the block, transformers is imported as if torch were not installed.

    `AutoTokenizer` and `AutoConfig` import torch, its compiler and the base class of all models: several seconds of CPU
    and 330 MB, in every agent worker and next to every engine. Modules imported inside the block are kept apart: an
    import of transformers elsewhere in this process (a reward function's model) finds torch. Where transformers has
    been imported before, nothing is hidden. For the start of a process: another thread cannot import torch meanwhile. A
    tokenizer from inside the block refuses `return_tensors="pt"`.
    """
    with _lock:
        if _TRANSFORMERS in sys.modules:
            yield
            return
        was_quiet = os.environ.get(_QUIET)
        os.environ[_QUIET] = "1"
        torch = sys.modules.pop(_TORCH, None)
        sys.modules.update(_apart)
        sys.modules[_TORCH] = None  # type: ignore[assignment]  # "not installed" to the import system
        try:
            yield
        finally:
            del sys.modules[_TORCH]
            if torch is not None:
                sys.modules[_TORCH] = torch
            for name in [name for name in sys.modules if name.partition(".")[0] == _TRANSFORMERS]:
                _apart[name] = sys.modules.pop(name)
            if was_quiet is None:
                del os.environ[_QUIET]
            else:
                os.environ[_QUIET] = was_quiet
