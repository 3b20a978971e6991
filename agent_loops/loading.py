"""What is read from a model's folder before its first token: the tokenizer, and which ids end a reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.agent_loops.errors import TemplateError


def load_tokenizer(model: str) -> Any:
    """The model's fast tokenizer. Imports transformers; raises `TemplateError` naming the folder where it is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise TemplateError(f"no tokenizer in {model!r}: {error}") from error


def generation_stops(model: str) -> tuple[int, ...]:
    """Ids at which the model's author stops a reply: ``eos_token_id`` of ``generation_config.json``, one or several.

    Llama 3.1 has three, of which its chat template writes one. Empty where the model has no such file. Raises
    `TemplateError` where the file cannot be read.
    """
    from transformers.utils import cached_file

    file = cached_file(model, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return ()
    try:
        told = json.loads(Path(file).read_text()).get("eos_token_id")
        ids = told if isinstance(told, list) else [] if told is None else [told]
        return tuple(int(number) for number in ids)
    except (ValueError, TypeError, AttributeError) as error:
        raise TemplateError(f"eos_token_id in generation_config.json of {model!r} cannot be read: {error}") from error
