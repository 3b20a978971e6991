"""The hf engine's process: a model, its decoding thread, and one connection to the sidecar that owns it.

The connection is an inherited socket pair: no other process can reach the engine, and its end is the owner's death, so
a killed sidecar leaves no engine behind. One JSON object per line, both ways:

    in   {"op": "generate", "id", "token_ids", "sampling", "images", "routed_from", "adapter"} · {"op": "abort", "id"}
         {"op": "load", "call", "manifest"} · {"op": "stage", "call", "offer"} · {"op": "ping", "call"}
         {"op": "receive", "call", "offer"} · {"op": "sleep", "call", "level"} · {"op": "wake", "call"}
         {"op": "adapter", "call", "name", "folder"} · {"op": "forget", "call", "name"}
    out  {"event": "ready", "info"} · {"event": "tokens", "answers": [[id, chunk], …], "errors": [[id, message], …]}
         {"event": "reply", "call", "report" | "refused" | "lost"} · {"event": "reply", "call", "steps", "in_flight", …}
         {"event": "reply", "call", "state" | "lost" | "refused" | "broken"}   of `stage` and `receive`: what was
                                received by a broadcast, or why not; broken: decoding is paused until a `load`
         {"event": "reply", "call"}   of `sleep`, `wake`, `forget` and `adapter`, which may have "bad": why not

Tokens of all requests are sent together every `TICK_S`, those of a finished request at once: a line per token and
request would cost more than sampling them.

New weights are copied into the model in place, tensor by tensor, and checked before and after. They come from files, or
from a broadcast that a thread receives while decoding continues, or, without a second copy of them, under the pause.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

from penstock.common import uncollected

with uncollected():
    import torch
    import transformers
    from safetensors import SafetensorError

    from penstock.rollout_server.config import RolloutConfig
    from penstock.rollout_server.engines.checkpoint import tensor_shapes
    from penstock.rollout_server.engines.child_link import LINE_LIMIT_BYTES
    from penstock.rollout_server.engines.hf import attention
    from penstock.rollout_server.engines.hf.adapters import LayerAdapters
    from penstock.rollout_server.engines.hf.batch import Batcher
    from penstock.rollout_server.engines.hf.in_place import InPlaceReceiver
    from penstock.rollout_server.engines.hf.vision import VisionBatcher
    from penstock.rollout_server.engines.hf.weights import Copy, OffloadedWeights, plan_copies
    from penstock.rollout_server.protocol import EngineInfo, ImageRef, Sampling
    from penstock.weight_sync import (
        BadAdapter,
        HubNames,
        LoadReport,
        Manifest,
        MappedVersion,
        Offer,
        StagedWeights,
        UnmappedTensors,
        WeightReader,
        WeightsBroken,
        WeightsRefused,
        WeightsUnreachable,
        can_stream,
    )

logger = logging.getLogger("penstock.hf")
TICK_S = 0.12


class HFServer:
    """One connection's worth of engine. `run` returns when the owner is gone."""

    def __init__(self, config: RolloutConfig, model_path: str, seed: int) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        self._sees = hasattr(transformers.AutoConfig.from_pretrained(model_path), "vision_config")
        kind = transformers.AutoModelForImageTextToText if self._sees else transformers.AutoModelForCausalLM
        dtype = getattr(torch, config.dtype)
        self.model = kind.from_pretrained(model_path, dtype=dtype, attn_implementation=attention.NAME).eval()
        self._finished, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._model_path = model_path
        self._weights, self._staged = WeightReader(), StagedWeights()
        self.batcher = self._batcher(model_path, seed)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The last task of each kind of message that takes long: a task that nothing refers to may be collected."""
        self._work = {
            "load": self._load,
            "stage": self._stage,
            "receive": self._receive,
            "sleep": self._sleep,
            "adapter": self._adapter,
        }
        """Long work, by the kind of message."""
        self.given_up = OffloadedWeights(self.model)
        self._in_place = InPlaceReceiver(self.model, self.batcher, lambda: self._names)

    @cached_property
    def _names(self) -> HubNames | None:
        """Made by the first load, while decoding continues: the first token needs none of it.

        None for a model whose files transformers takes in another way; versions then have its own names.
        """
        try:
            return HubNames.of(self.model, tensor_shapes(self._model_path) or None)
        except UnmappedTensors as error:
            logger.warning("%s: versions are loaded under the model's own names: %s", self._model_path, error)
            return None

    def _batcher(self, model_path: str, seed: int) -> Batcher | VisionBatcher:
        if self._sees:
            if self.config.routing_replay:
                raise ValueError("rollout.routing_replay: no model that sees pictures records its routers' choices")
            if self.config.adapter_rank:
                raise ValueError("rollout.adapter_rank: the hf engine has no adapters of models that see pictures")
            return VisionBatcher(self.model, model_path, self.config, seed, self._wake)
        return Batcher(self.model, self.config, seed, self._wake)

    def _wake(self) -> None:
        """Send what has ended at once. Called in whatever thread."""
        self._loop.call_soon_threadsafe(self._finished.set)

    def info(self) -> EngineInfo:
        limits = ["The hf engine computes on the CPU, in one process."]
        if self._sees:
            limits.append("Of a vision-language model it decodes one request at a time and reuses no prefix.")
        return EngineInfo(
            name="hf",
            engine_version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            version=self.batcher.sampler.version,
            vocab_size=self.model.get_input_embeddings().num_embeddings,
            max_model_len=self.config.max_model_len,
            images=self._sees,
            routed_experts=self.config.routing_replay,
            adapter_rank=self.config.adapter_rank,
            limits=limits,
        )

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve until the owner's end of the connection closes. Raises where decoding died."""
        self._writer = writer
        self._send({"event": "ready", "info": self.info().model_dump()})
        ticking = asyncio.create_task(self._send_tokens())
        reading = asyncio.create_task(self._read(reader))
        done, _ = await asyncio.wait({ticking, reading}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            match message["op"]:
                case "generate":
                    self._add(message)
                case "abort":
                    self.batcher.cancel(message["id"])
                case "load" | "stage" | "receive" | "sleep" | "adapter" as op:
                    self._tasks[op] = asyncio.create_task(self._answer(op, message))
                case "wake":
                    self.given_up.take_back()
                    if not self.given_up.dropped:
                        self.batcher.wake()
                    self._send({"event": "reply", "call": message["call"]})
                case "forget":
                    self._adapters.remove(message["name"])
                    self._send({"event": "reply", "call": message["call"]})
                case "ping":
                    self._send({"event": "reply", "call": message["call"], **self._figures()})

    def _add(self, message: Mapping[str, Any]) -> None:
        name, token_ids, sampling = message["id"], message["token_ids"], Sampling(**message["sampling"])
        if isinstance(self.batcher, VisionBatcher):
            self.batcher.add(name, token_ids, sampling, [ImageRef(**image) for image in message["images"]])
        else:
            self.batcher.add(name, token_ids, sampling, message["routed_from"], message["adapter"])

    def _figures(self) -> dict[str, Any]:
        cache_bytes, most = self.batcher.cache_bytes
        return {
            "steps": self.batcher.steps,
            "in_flight": self.batcher.in_flight,
            "kv_blocks": self.batcher.kv_blocks_in_use,
            "reused_tokens": self.batcher.reused_tokens,
            "version": self.batcher.sampler.version,
            "used_bytes": self.given_up.held_bytes + cache_bytes,  # weights that were moved or dropped do not count
            "most_bytes": self.given_up.weight_bytes + most,
        }

    async def _send_tokens(self) -> None:
        ticked = 0.0
        while (fatal := self.batcher.fatal_error) is None:
            self._finished.clear()
            due = time.monotonic() - ticked >= TICK_S
            ticked = time.monotonic() if due else ticked
            if news := self.batcher.collect(only_ended=not due):
                answers = [[name, vars(item)] for name, item in news if not isinstance(item, str)]
                errors = [[name, item] for name, item in news if isinstance(item, str)]
                self._send({"event": "tokens", "answers": answers, "errors": errors})
                await self._writer.drain()
            await _wait(self._finished, max(0.0, ticked + TICK_S - time.monotonic()))
        raise RuntimeError(f"decoding stopped: {fatal}")

    async def _answer(self, op: str, message: Mapping[str, Any]) -> None:
        """Replies with the fields that the work returns, or with its refusal. Other errors end the process: the model
        may hold half of a version, and no token may be sampled from it."""
        try:
            fields = await asyncio.to_thread(self._work[op], message)
        except WeightsRefused as error:
            fields = {"refused": str(error)}
        except WeightsUnreachable as error:
            fields = {"lost": str(error)}
        except WeightsBroken as error:
            fields = {"broken": str(error)}
        except Exception as error:
            logger.exception("%s failed; the engine ends", op)
            _end_damaged(str(error))
        self._send({"event": "reply", "call": message["call"], **fields})

    # in threads ----------------------------------------------------------------------------------------------------
    def _sleep(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.batcher.sleep()
        self.given_up.give_up(drop=message["level"] == 2)
        return {}

    def _stage(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"state": self._staged.receive(_offer(message))}

    def _receive(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"state": self._in_place.receive(_offer(message))}

    def _adapter(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Decoding continues: no request has this adapter yet."""
        names = {}
        if self._names is not None:
            names = {self._names.stored_name(name): name for name in self._adapters.weights}
        try:
            self._adapters.put(message["name"], self._adapters.read(Path(message["folder"]), names))
        except (BadAdapter, OSError, SafetensorError, ValueError) as error:
            return {"bad": str(error)}
        return {}

    @property
    def _adapters(self) -> LayerAdapters:
        """Adapters of a server with rollout.adapter_rank: no other gets messages that need them."""
        assert isinstance(self.batcher, Batcher)
        assert self.batcher.adapters is not None
        return self.batcher.adapters

    def _load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """fetch and verify (decoding continues) → pause → copy, verify what the model holds, version → resume."""
        manifest, started = Manifest.parse(message["manifest"]), time.perf_counter()
        received_s = 0.0
        copies: list[Copy] = []  # none for a version that the model holds already
        load: Callable[[], None] = partial(_run, copies)
        with ExitStack() as stack:
            if self._in_place.holds(manifest):
                received_s = self._in_place.accept()
            elif self.config.receives_in_place and manifest.transport != "broadcast" and can_stream(manifest):
                load = stack.enter_context(self._in_place.opened(manifest))
            else:
                copies += self._fetched(manifest)
            fetch_s = time.perf_counter() - started
            pause_s, load_s, in_flight = self.batcher.swap(load, manifest.version)
        if self.given_up.dropped:
            self.given_up.dropped = False
            self.batcher.wake()
        report = LoadReport(
            version=self.batcher.sampler.version,
            fetch_s=fetch_s,
            pause_s=pause_s,
            load_s=load_s + received_s,
            in_flight=in_flight,
        )
        return {"report": report.model_dump()}

    def _fetched(self, manifest: Manifest) -> list[Copy]:
        # What a sidecar has fetched is a file, whatever it was announced as.
        source = self._staged.take if manifest.transport == "broadcast" else self._weights.read
        tensors = source(manifest)
        copies = plan_copies(self.model, manifest, self._names.joined(tensors) if self._names else tensors)
        if isinstance(tensors, MappedVersion):  # rounded and joined tensors got their checksums just now, from the file
            tensors.check_unchanged()
        self._in_place.forget()
        return copies

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def _offer(message: Mapping[str, Any]) -> Offer:
    """Raises `WeightsUnreachable` for an offer of another form."""
    try:
        return Offer.parse(message["offer"])
    except ValueError as error:
        raise WeightsUnreachable(str(error)) from error


def _run(copies: list[Copy]) -> None:
    for copy in copies:
        copy.run()
    for copy in copies:
        if not copy.landed():
            _end_damaged(f"tensor {copy.name!r} does not hold what was copied into it")


def _end_damaged(text: str) -> NoReturn:
    """The old weights are overwritten already: no token may be sampled from what is there now."""
    print(text, file=sys.stderr, flush=True)
    # Memory did not take the weights: only a new process is safe.
    os._exit(3)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


async def _serve(arguments: argparse.Namespace) -> None:
    config = RolloutConfig.model_validate_json(arguments.config)
    with uncollected():
        server = HFServer(config, arguments.model, arguments.seed)
    connection = socket.socket(fileno=arguments.fd)
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT_BYTES)
    await server.run(reader, writer)


def main() -> None:
    """``python -m penstock.rollout_server.engines.hf.server --fd N --model M --config JSON --seed S``."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", required=True, help="RolloutConfig as JSON")
    parser.add_argument("--seed", type=int, required=True)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    status = 0
    try:
        asyncio.run(_serve(parser.parse_args()))
    except BaseException:
        logger.exception("the hf engine ends")
        status = 1
    # The decoding thread may be in the middle of a step whose requests were aborted.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
