"""Vision-language models in the hf engine: a forward pass per request and token, each request with its own KV cache.

    event loop       add, cancel ──► live requests;  collect ◄── Record
    decoding thread  for each admitted request: (first) read images, prefill │ decode one token → Sampler.draw → Record
    loader thread    swap: asks for a pause; the decoding thread grants it between two tokens

`batch` takes no pixels. This is for small models and for tests: nothing is batched and no
prefix is reused.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoImageProcessor, DynamicCache

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf.sampling import ActiveRequest, HaltingRequests, Record, Sampler
from penstock.rollout_server.pictures import read_images
from penstock.rollout_server.protocol import ImageRef, Sampling


@dataclass(slots=True)
class VisionRequest(ActiveRequest):
    """One request."""

    ids: list[int] = field(default_factory=list)
    """Context of the row: the prompt and the sampled ids."""
    images: Sequence[ImageRef] = ()
    cache: Any = None
    """None: the whole context is to be computed."""
    rope_deltas: torch.Tensor | None = None
    """Lag of positions behind ids, because the rows of an image share positions; the model keeps only one."""


class VisionBatcher(HaltingRequests[VisionRequest, tuple[float, list[VisionRequest]]]):
    """All methods but `swap`, `halt`, `go_on` and `sleep` are for the event loop that made it."""

    kv_blocks_in_use = 0
    reused_tokens = 0
    cache_bytes = 0, 0
    """Not measured."""

    def __init__(
        self, model: Any, model_path: str, config: RolloutConfig, seed: int, on_finish: Callable[[], None]
    ) -> None:
        super().__init__(on_finish)
        self.sampler = Sampler(seed)
        self.steps = 0
        self._model, self._config = model, config
        self._pixels_of = AutoImageProcessor.from_pretrained(model_path)
        self._thread.start()

    # requests ------------------------------------------------------------------------------------------------------
    def add(self, name: str, token_ids: list[int], sampling: Sampling, images: Sequence[ImageRef] = ()) -> None:
        """Queue a request; its tokens come out of `collect`."""
        self._live[name] = VisionRequest(Record(sampling, len(token_ids)), ids=list(token_ids), images=tuple(images))
        self._news.set()

    def cancel(self, name: str) -> None:
        """Unknown names are fine."""
        self._live.pop(name, None)

    def swap(self, load: Callable[[], None], version: int) -> tuple[float, float, int]:
        """See `Batcher.swap`."""
        with self._between_passes():
            paused, begun = self._halt or self._stop_decoding()
            began = time.perf_counter()
            load()
            load_s = time.perf_counter() - began
            for live in begun if self._config.pause != "keep" else ():
                live.cache = None
                live.finish_reason = "abort" if self._config.pause == "abort" else None
            self.sampler.version = version
            self._halt = None
        self._news.set()
        in_flight = 0 if self._config.pause == "abort" else len(begun)
        return time.perf_counter() - paused, load_s, in_flight

    def _stop_decoding(self) -> tuple[float, list[VisionRequest]]:
        # A copy: the event loop adds requests meanwhile, and this is the loader's thread.
        every = list(self._live.values())
        return time.perf_counter(), [live for live in every if live.cache is not None and not live.finish_reason]

    def _turn_away(self) -> None:
        for live in list(self._live.values()):
            if not live.finish_reason and not live.error:
                live.cache, live.finish_reason = None, "abort"
                self._on_finish()

    # the decoding thread -------------------------------------------------------------------------------------------
    def _decode(self) -> bool:
        """One token of the oldest requests, as many as the cache has room for."""
        if self._asleep:
            with self._turn:
                self._turn_away()
            return False
        if self._halt is not None:
            return False
        room, admitted = self._config.kv_cache_tokens, list[VisionRequest]()
        for live in list(self._live.values())[: self._config.max_concurrent]:
            room -= live.record.context_len + live.record.sampling.max_new_tokens
            if room < 0:
                break
            admitted.append(live)
        for live in admitted:
            self._take_turn(live)
        return bool(admitted)

    def _take_turn(self, live: VisionRequest) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._swaps_waiting, timeout=self._config.request_timeout_s)
            if live.finish_reason or live.error or self._halt is not None:
                return
            try:
                self._step(live)
            except Exception as error:  # noqa: BLE001 - of this request: a picture that is none, places that do not fit
                live.error = f"{type(error).__name__}: {error}"
        if live.finish_reason or live.error:
            live.cache = None
            self._on_finish()

    @torch.no_grad()
    def _step(self, live: VisionRequest) -> None:
        inputs: Mapping[str, torch.Tensor] = {"input_ids": torch.tensor([live.ids[-1:]])}
        if live.cache is None:
            inputs, live.rope_deltas = self._first_inputs(live), None
        inner = self._model.base_model
        inner.rope_deltas = live.rope_deltas
        cache = DynamicCache() if live.cache is None else live.cache
        logits = self._model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        live.cache, live.rope_deltas = cache, inner.rope_deltas
        (token,) = self.sampler.draw(logits[:, -1].float(), [live.record]).tolist()
        live.ids.append(token)
        self.steps += 1
        sampling = live.record.sampling
        if token in sampling.stop_token_ids:
            live.finish_reason = "stop"
        elif len(live.record.samples) == sampling.max_new_tokens:
            live.finish_reason = "length"

    def _first_inputs(self, live: VisionRequest) -> Mapping[str, torch.Tensor]:
        from PIL import Image

        ids = torch.tensor([live.ids])
        if not live.images:
            return {"input_ids": ids}
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in read_images(live.images)]
        seen = self._pixels_of(images, return_tensors="pt")
        places = (ids == self._model.config.image_token_id).to(torch.int32)
        return {"input_ids": ids, "mm_token_type_ids": places, **seen}
