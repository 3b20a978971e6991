"""Whether this engine can train a model, tried before a run: in a separate process, which may crash or fill memory.

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
from typing import Any

WHOLE_BYTES = 2 << 30
"""A model whose files are larger is tried as a copy."""
MOST_PARAMETERS = 1 << 29
"""Of a copy."""
TIMEOUT_S = 300.0
SMALL = {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Trial:
    refused: str = ""
    """Why the engine would not train this model; empty where it would."""
    skipped: str = ""
    """Why that could not be found out."""
    copied: bool = False
    """A copy was tried: nothing is known of the weights."""


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

    copied = not Path(model).is_dir() or _bytes(Path(model)) > WHOLE_BYTES
    try:
        found = try_copy(model) if copied else _try_whole(model)
    except BadJob as error:
        found = Trial(refused=str(error), copied=copied)
    print(json.dumps(asdict(found)))


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))


def _try_whole(model: str) -> Trial:
    from penstock.trainer.engines.fsdp.models import load_model

    load_model(model)
    return Trial()


def try_copy(model: str) -> Trial:
    """Raises `BadJob`. What fails by itself proves nothing about the model: the copy may be at fault."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from penstock.trainer.engines.fsdp.attention import PROBE, first_sentence, refuse_unpackable, use_packed_attention

    try:
        config = AutoConfig.from_pretrained(model)
        _make_small(config.get_text_config())
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
        return Trial(skipped=f"no small copy of it can be made: {first_sentence(error)}", copied=True)
    refuse_unpackable(shape)
    parameters = sum(parameter.numel() for parameter in shape.parameters())
    if parameters > MOST_PARAMETERS:
        return Trial(skipped=f"a copy would have {parameters / 1e6:.0f} M parameters", copied=True)
    try:
        copy = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        copy(input_ids=torch.tensor([PROBE[0]]), use_cache=False)
    except Exception as error:  # noqa: BLE001
        return Trial(skipped=f"a small copy of it does not run: {first_sentence(error)}", copied=True)
    use_packed_attention(copy)
    return Trial(copied=True)


def _make_small(config: Any) -> None:
    """In place."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["first", *["others"] * (layers - 1)]
    kept = sorted({kinds.index(kind) for kind in kinds})
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int | float):
            setattr(config, name, value)
    # Smaller weights would hide a difference in the logits, larger ones would show float32's rounding.
    config.initializer_range = config.hidden_size**-0.5
    chosen = max(getattr(config, "num_experts_per_tok", None) or 1, getattr(config, "n_group", None) or 1)
    for name in EXPERTS:
        if isinstance(having := getattr(config, name, None), int):
            setattr(config, name, min(having, 4 * chosen))
    config.pad_token_id = None  # it may lie beyond the copy's words


if __name__ == "__main__":
    main(sys.argv[1])
