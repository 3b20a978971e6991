"""verl's queue (PyPI ``TransferQueue``) by its key-value interface: its driver process. Started by `sides`.

Runs in the environment that scripts/setup-bench makes, without Penstock: hence imports by file name, and hence a ray of
its own. Producers are ray actors, as in that package's own performance test; the consumer is this process.

    producer   kv_put(key, fields, tag) of each payload, or kv_batch_put of all its payloads at once
    consumer   kv_batch_get(all keys), kv_clear(all keys)

Storage is its default: SimpleStorage, two units. Payloads are CPU tensors that share memory with the numpy arrays.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from typing import Any

import ray
import torch
import transfer_queue as tq
from arrays import payload_arrays
from child import answer_questions, own_stdout
from tensordict import TensorDict

PARTITION = "train"
LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the machine's address in the network."""
LOGICAL_CPUS = 32
"""Ray's scheduling units, not cores: the queue's three actors ask for one each."""


def fields_of(size: str) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(values) for name, values in payload_arrays(size).items()}
    return {**tensors, "reward": torch.tensor(1.0)}


@ray.remote(num_cpus=0)
class Producer:
    def __init__(self, number: int) -> None:
        self._number = number
        tq.init()

    def get_ready(self, size: str, count: int, batched: bool) -> None:
        self._keys = [f"{self._number}_{n}" for n in range(count)]
        self._fields = fields_of(size)
        if batched:
            stacked = {name: torch.stack([value] * count) for name, value in self._fields.items()}
            self._batch = TensorDict(stacked, batch_size=[count])

    def put(self, batched: bool) -> dict[str, Any]:
        began = time.perf_counter()
        if batched:
            tags = [{"global_steps": 0} for _ in self._keys]
            tq.kv_batch_put(keys=self._keys, partition_id=PARTITION, fields=self._batch, tags=tags)
            ended = time.perf_counter()
            return {"began": began, "ended": ended, "each_s": [(ended - began) / len(self._keys)] * len(self._keys)}
        each, last = [], began
        for key in self._keys:
            tq.kv_put(key=key, partition_id=PARTITION, fields=self._fields, tag={"global_steps": 0})
            now = time.perf_counter()
            each.append(now - last)
            last = now
        return {"began": began, "ended": last, "each_s": each}


class Driver:
    def __init__(self) -> None:
        self._producers: list[Any] = []

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "versions":
            return {"ray": ray.__version__, "torch": torch.__version__}
        return self._round(question["size"], question["producers"], question["count"], question["batched"])

    def _round(self, size: str, producers: int, count: int, batched: bool) -> dict[str, Any]:
        while len(self._producers) < producers:
            self._producers.append(Producer.remote(len(self._producers)))
        active, share = self._producers[:producers], count // producers
        ray.get([producer.get_ready.remote(size, share, batched) for producer in active])
        produced = ray.get([producer.put.remote(batched) for producer in active])
        keys = [f"{worker}_{n}" for worker in range(producers) for n in range(share)]
        began = time.perf_counter()
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        tq.kv_clear(keys=keys, partition_id=PARTITION)
        took = time.perf_counter() - began
        check(data, size, count)
        return {"produced": produced, "consume_s": took}


def check(data: TensorDict, size: str, count: int) -> None:
    wanted = fields_of(size)["response_ids"]
    if data.batch_size[0] != count or not torch.equal(data["response_ids"][count - 1], wanted):
        raise ValueError(f"{data.batch_size} of {size} came back, {count} were put")


def main() -> None:
    replies = own_stdout()
    folder = tempfile.mkdtemp(prefix="tq-", dir="/tmp")  # ray's socket paths must stay short
    try:
        ray.init(
            num_cpus=LOGICAL_CPUS,
            include_dashboard=False,
            namespace=f"bench-{secrets.token_hex(4)}",
            object_store_memory=256 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
            _temp_dir=folder,
        )
        tq.init()
        answer_questions(replies, Driver().answer)
    finally:
        tq.close()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
