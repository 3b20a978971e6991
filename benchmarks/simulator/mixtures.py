"""Layouts of mixtures of experts on 8 to 512 GPUs, as `penstock doctor --gpus` proposes them, for docs/how/scale.md."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from penstock.deploy import app

ROOT = Path(__file__).parents[2]
GPU_COUNTS, GPU_GB = (8, 64, 128, 512), 80
RECIPE = ROOT / "recipes" / "retool" / "gpu8.yaml"
WORDS = ("rollout.max_model_len=32768", "trainer.micro_batch_tokens=32768", "groups_per_step=512")
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "30B-A3B": {
        **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        **{"head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16"},
    },
    "235B-A22B": {
        **{"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4},
        **{"intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8},
        **{"head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16"},
    },
    "744B-A40B": {
        **{"hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"intermediate_size": 12288, "moe_intermediate_size": 2048, "num_experts": 256, "num_experts_per_tok": 8},
        **{"head_dim": 128, "vocab_size": 151936, "first_k_dense_replace": 3, "n_shared_experts": 1},
        "dtype": "bfloat16",
    },
}
"""Sizes of Qwen3-30B-A3B and Qwen3-235B-A22B; those of the third are assumed, with plain attention."""


def layout_table() -> Iterator[str]:
    yield "| mixture | GPUs | of each | tokens of a rank | weights, gradients | tokens of experts | settings |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name in MIXTURES:
        for count in GPU_COUNTS:
            report = _proposed(name, count)
            best = report["layouts"][0]
            words = best["settings"].replace("trainer.", "").replace("parallel.", "")
            settings = " ".join(word for word in words.split() if not word.startswith("ranks="))
            sizes = f"{best['total_bytes'] / 2**30:.0f} GiB | {best['tokens']:,}"
            moved = f"{best['received_bytes'] / 1e9:.0f} GB | {best['exchanged_bytes'] / 1e9:.0f} GB"
            yield f"| {name} | {count} | {sizes} | {moved} | {f'`{settings}`' if report['ok'] else 'none fits'} |"


def _proposed(name: str, count: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(MIXTURES[name], file)
        file.flush()
        words = ["doctor", str(RECIPE), *WORDS, "--config", file.name, "--gpus", f"{count}x{GPU_GB}", "--json"]
        report: dict[str, Any] = json.loads(CliRunner().invoke(app, words).output)
    return report
