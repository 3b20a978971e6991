"""A student with much to learn: the calculator's model with noise on its weights.

    python recipes/distill/student.py --out data/distill/student

It still calls its tool now and then, and writes calls and copies digits with mistakes: many tokens have to become
right, and a reward at the end says little about each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE = Path(__file__).parents[1] / "calculator" / "model"


@torch.no_grad()
def main(given: Sequence[str] | None = None) -> None:
    options = _options(given)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * options.noise)
    model.save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.base).save_pretrained(options.out)


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("data/distill/student"), help="folder of the student")
    parser.add_argument("--base", type=Path, default=BASE, help="folder of the model that gets the noise")
    parser.add_argument("--noise", type=float, default=0.35, help="in standard deviations of each matrix")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
