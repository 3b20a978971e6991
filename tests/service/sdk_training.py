"""A client that trains by pipelined calls of Tinker's SDK and prints every loss as JSON. Run by `test_sdk.py`."""

from __future__ import annotations

import json
import random
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
STEPS = 50


def datum(source: random.Random) -> types.Datum:
    ids = [source.randrange(1, 500) for _ in range(source.randrange(4, 30))]
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})


def main(name: str, seed: int, ranks: list[int]) -> dict[int, list[float]]:
    """A model of each rank, all trained at the same time; losses by rank."""
    sources = {rank: random.Random(seed * 1000 + rank) for rank in ranks}
    service = tinker.ServiceClient()
    models = {
        rank: service.create_lora_training_client(base_model=name, rank=rank, seed=seed).result() for rank in ranks
    }
    losses: dict[int, list[float]] = {rank: [] for rank in ranks}
    for _ in range(STEPS):
        gradients = {
            rank: [model.forward_backward([datum(sources[rank])], "cross_entropy") for _ in range(2)]
            for rank, model in models.items()
        }
        steps = [model.optim_step(types.AdamParams(learning_rate=3e-3)) for model in models.values()]
        for rank, futures in gradients.items():
            losses[rank] += [one.result().metrics["loss:sum"] for one in futures]
        for step in steps:
            step.result()
    return losses


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), [int(rank) for rank in sys.argv[3:]])))
