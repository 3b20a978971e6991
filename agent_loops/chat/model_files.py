"""Reads a model's folder: the tokenizer, the ids that end a reply, the processor of images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.agent_loops.errors import TemplateError
from penstock.rollout_server import no_torch


def load_tokenizer(model: str) -> Any:
    """The model's fast tokenizer. Imports transformers. Raises `TemplateError` naming the folder if it has none."""
    with no_torch():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise TemplateError(f"no tokenizer in {model!r}: {error}") from error


def load_processor(model: str, tokenizer: Any) -> Any | None:
    """The model's processor as far as images go; None where the model takes none.

    `AutoProcessor` would load the part for videos too, which wants torchvision. Raises `TemplateError`.
    """
    declared = {**_json_of(model, "preprocessor_config.json"), **_json_of(model, "processor_config.json")}
    if "image_processor" not in declared and "image_processor_type" not in declared:
        return None
    import transformers

    kind = getattr(transformers, str(declared.get("processor_class")), None)
    if kind is None:
        raise TemplateError(f"transformers has no processor {declared.get('processor_class')!r}, which {model!r} names")
    parts = {"tokenizer": tokenizer, "image_processor": transformers.AutoImageProcessor.from_pretrained(model)}
    try:
        return images_only(kind, parts)
    except (TypeError, ValueError, AttributeError) as error:
        raise TemplateError(f"the processor of {model!r} cannot be made for images alone: {error}") from error


def images_only(kind: type, parts: Mapping[str, Any]) -> Any:
    """A processor of this class that has `parts` and nothing else."""

    class ImagesOnly(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)

    return ImagesOnly(**{name: parts.get(name) for name in ImagesOnly.get_attributes()})


def generation_stops(model: str) -> tuple[int, ...]:
    """Ids at which the model's author stops a reply: ``eos_token_id`` of ``generation_config.json``, one or several.

    Llama 3.1 has three, of which its chat template writes one. Empty where the model has no such file. Raises
    `TemplateError` where the file cannot be read.
    """
    try:
        declared = _json_of(model, "generation_config.json").get("eos_token_id")
        ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
        return tuple(int(number) for number in ids)
    except (ValueError, TypeError) as error:
        raise TemplateError(f"eos_token_id in generation_config.json of {model!r} cannot be read: {error}") from error


def _json_of(model: str, name: str) -> dict[str, Any]:
    """A JSON file of the model's; empty if it has none. Raises `TemplateError`."""
    with no_torch():
        from transformers.utils import cached_file

    file = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    try:
        declared = json.loads(Path(file).read_text()) if file else {}
    except ValueError as error:
        raise TemplateError(f"{name} of {model!r} is not valid JSON: {error}") from error
    if not isinstance(declared, dict):
        raise TemplateError(f"{name} of {model!r} is not a JSON object")
    return declared
