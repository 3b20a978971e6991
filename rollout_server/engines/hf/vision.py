"""Vision-language models in the hf engine: a forward pass per request and token, each request with its own KV cache.

    event loop       add, cancel ──► live requests;  collect ◄── Record
    decoding thread  for each admitted request: (first) read images, prefill │ decode one token → Sampler.draw → Record
    loader thread    swap: asks for a pause; the decoding thread grants it between two tokens

`batch` takes no pixels. This is for small models and for tests: nothing is batched and no
prefix is reused.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoImageProcessor, DynamicCache

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf.sampling import HaltingRequests, Live, Record, Sampler
from penstock.rollout_server.pictures import read_images
from penstock.rollout_server.protocol import ImageRef, Sampling

IDLE_S = 0.05


@dataclass(slots=True)
class Seeing(Live):
    """One request."""

    ids: list[int] = field(default_factory=list)
    """Its context, prompt and what was sampled."""
    images: Sequence[ImageRef] = ()
    cache: Any = None
    """None: the whole context is to be computed."""
    rope_deltas: torch.Tensor | None = None
    """How far positions lag behind ids because an image's rows share theirs; the model itself keeps one alone."""

    @property
    def tokens_at_most(self) -> int:
        return self.record.context_len + self.record.sampling.max_new_tokens


class VisionBatcher(HaltingRequests[Seeing, tuple[float, list[Seeing]]]):
    """Owns the decoding thread. All methods but `swap`, `halt` and `go_on` are for the event loop that made it."""

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
        self._asleep = False
        self._fatal: str | None = None
        self._thread = threading.Thread(target=self._run, name="hf-vision", daemon=True)
        self._thread.start()

    # requests ------------------------------------------------------------------------------------------------------
    def add(self, name: str, token_ids: list[int], sampling: Sampling, images: Sequence[ImageRef] = ()) -> None:
        """Queue a request; its tokens come out of `collect`."""
        self._live[name] = Seeing(Record(sampling, len(token_ids)), ids=list(token_ids), images=tuple(images))

    def cancel(self, name: str) -> None:
        """Unknown names are fine."""
        self._live.pop(name, None)

    def fatal_error(self) -> str | None:
        """Why the decoding thread is gone; None while it runs."""
        return self._fatal

    def swap(self, load: Callable[[], None], version: int) -> tuple[float, float, int]:
        """As `Batcher.swap`."""
        self._swaps_waiting += 1
        with self._turn:
            self._swaps_waiting -= 1
            paused, begun = self._halt or self._stop_decoding()
            began = time.perf_counter()
            load()
            load_s = time.perf_counter() - began
            for live in begun if self._config.pause != "keep" else ():
                live.cache = None
                live.finish_reason = "abort" if self._config.pause == "abort" else None
            self.sampler.version = version
            self._halt = None
            self._turn.notify_all()
        in_flight = 0 if self._config.pause == "abort" else len(begun)
        return time.perf_counter() - paused, load_s, in_flight

    def _stop_decoding(self) -> tuple[float, list[Seeing]]:
        return time.perf_counter(), [
            live for live in self._live.values() if live.cache is not None and not live.finish_reason
        ]

    def sleep(self) -> None:
        """As `Batcher.sleep`."""
        self._swaps_waiting += 1
        with self._turn:
            self._swaps_waiting -= 1
            self._asleep = True
            self._turn_away()
            self._turn.notify_all()

    def wake(self) -> None:
        """As `Batcher.wake`."""
        self._asleep = False

    def _turn_away(self) -> None:
        for live in list(self._live.values()):
            if not live.finish_reason and not live.error:
                live.cache, live.finish_reason = None, "abort"
        self._on_finish()

    # the decoding thread -------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while True:
                admitted = list(self._admitted())
                for live in admitted:
                    self._take_turn(live)
                if not admitted:
                    time.sleep(IDLE_S)
        except BaseException as error:  # whatever it is, the owner ends this process with it
            self._fatal = f"{type(error).__name__}: {error}"
            self._on_finish()
            raise

    def _admitted(self) -> Iterator[Seeing]:
        """The oldest ones, as many as the cache has room for."""
        if self._asleep:
            with self._turn:
                if self._live:
                    self._turn_away()
            return
        if self._halt is not None:
            return
        room, places = self._config.kv_cache_tokens, self._config.max_concurrent
        for live in list(self._live.values())[:places]:
            room -= live.tokens_at_most
            if room < 0:
                return
            yield live

    def _take_turn(self, live: Seeing) -> None:
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
    def _step(self, live: Seeing) -> None:
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

    def _first_inputs(self, live: Seeing) -> Mapping[str, torch.Tensor]:
        from PIL import Image

        ids = torch.tensor([live.ids])
        if not live.images:
            return {"input_ids": ids}
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in read_images(live.images)]
        seen = self._pixels_of(images, return_tensors="pt")
        places = (ids == self._model.config.image_token_id).to(torch.int32)
        return {"input_ids": ids, "mm_token_type_ids": places, **seen}
