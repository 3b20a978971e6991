"""A client that trains by pipelined calls of Tinker's SDK and prints every loss as JSON. Run by `test_sdk.py`."""

from __future__ import annotations

import json
import random
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
STEPS = 150


def datum(source: random.Random) -> types.Datum:
    ids = [source.randrange(1, 500) for _ in range(source.randrange(4, 30))]
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})


def main(name: str, seed: int) -> list[float]:
    source = random.Random(seed)
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=name, rank=8, seed=seed).result()
    losses = []
    for _ in range(STEPS):
        gradients = [model.forward_backward([datum(source)], "cross_entropy") for _ in range(2)]
        step = model.optim_step(types.AdamParams(learning_rate=3e-3))
        losses += [one.result().metrics["loss:sum"] for one in gradients]
        step.result()
    return losses


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
