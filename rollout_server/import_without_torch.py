"""transformers for those who hold no model: tokenizers and configurations, without torch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_TORCH, _TRANSFORMERS = "torch", "transformers"
_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Without it transformers advises whoever has no torch to install it."""
_lock = threading.RLock()
_apart: dict[str, ModuleType] = {}


@contextmanager
def no_torch() -> Iterator[None]:
    """Within it transformers is imported, and imports more of itself, as where torch is not installed.

    `AutoTokenizer` and `AutoConfig` import torch, its compiler and the base class of all models where torch is there:
    several seconds of a core and 330 MB, in every agent worker and beside every engine. What is imported within is kept
    apart: an import of transformers elsewhere in this process (a reward function's model) sees torch as ever. Where
    transformers has been imported already, nothing is hidden. For a process's start: a thread that imports torch
    meanwhile is told that there is none. A tokenizer from within refuses `return_tensors="pt"`.
    """
    with _lock:
        if _TRANSFORMERS in sys.modules:
            yield
            return
        was_quiet = os.environ.get(_QUIET)
        os.environ[_QUIET] = "1"
        torch = sys.modules.pop(_TORCH, None)
        sys.modules.update(_apart)
        sys.modules[_TORCH] = None  # type: ignore[assignment]  # what the import system reads as "not there"
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
