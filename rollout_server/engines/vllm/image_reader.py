"""Images of requests as an engine takes them: made once by a child process (`image_server`), kept by their content.

    requests ─► read ─► kept? ─┬─ yes ──────────────────────► SeenImage
                               └─ no ─► one at a time ─► image_server ─┘

Why a process: pixels are to be the trainer's, so they are made by torch and transformers as it has them, which neither
the sidecar nor the engine's environment has; and megabytes of them must not hold up the tokens of other answers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.child_link import LinkedChild
from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import BadRequest, EngineError, ImageRef


class ImageReader(LinkedChild):
    """Owns the process. `start` comes first, `stop` last; `read` may be called by several requests at once."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path) -> None:
        super().__init__("image reader", log_dir / "engine-images.log", "the process that reads images", config.threads)
        self._config, self._model = config, model
        self._cache: OrderedDict[str, SeenImage] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        """Requests of one group bring the same image: the others find it made."""

    async def start(self) -> None:
        """Returns when it has the model's processor. Raises `EngineError` if it gets none."""
        arguments = ["--model", self._model, "--dtype", self._config.dtype, "--threads", str(self._config.threads)]
        try:
            await self.open("penstock.rollout_server.engines.vllm.image_server", *arguments)
            reply = await self.call("look", self._config.start_timeout_s)
            if refused := reply.get("refused"):
                raise EngineError(str(refused), retryable=False)
        except BaseException:
            await self.stop()
            raise

    async def read(self, images: Sequence[ImageRef]) -> list[SeenImage]:
        """Return the images in order. Raises `BadRequest` naming the one that cannot be read or is none,
        `EngineError`.
        """
        return [await self._one(image, f"images.{number}") for number, image in enumerate(images)]

    async def _one(self, image: ImageRef, field: str) -> SeenImage:
        async with self._one_at_a_time:
            seen = self._cache.pop(image.sha256, None) or await self._see(image, field)
            self._cache[image.sha256] = seen  # now the newest
            while len(self._cache) > 1 and sum(one.nbytes for one in self._cache.values()) > (256 << 20):
                self._cache.popitem(last=False)
        return seen

    async def _see(self, image: ImageRef, field: str) -> SeenImage:
        reply = await self.call("see", self._config.request_timeout_s, image=image.model_dump())
        if refused := reply.get("refused"):
            raise BadRequest(field, str(refused).removeprefix("image: "))
        return SeenImage(image.sha256, int(reply["tokens"]), reply["item"])
