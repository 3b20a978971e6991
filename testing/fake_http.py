"""An HTTP engine without a model, for tests and measurements of what stands before one: see `fake_http_server`.

Its next token is that of `FakeEngine`, a hash of the context and the policy version: a token under a wrong version's
name is another token.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.child_link import child_environment
from penstock.rollout_server.engines.http.engine import HttpEngine, HttpWeights
from penstock.rollout_server.engines.http.event_client import EngineAddress
from penstock.rollout_server.engines.http.server_process import ChildServer, Installation, Product
from penstock.rollout_server.engines.vllm.engine import VLLMStream
from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import EngineError, GenerateRequest, Sampling, SleepLevel
from penstock.testing.fake_http_server import GENERATE, KEY_VARIABLE
from penstock.testing.fake_tokens import VOCAB
from penstock.weight_sync import Manifest, WeightsRefused

KEEP_S = 60.0


class FakeHttpServer(ChildServer):
    """One server process."""

    product = Product("the fake server", "fake", (1,), (2,), "", frozenset(), lambda installation: [])
    ready_path = "/health"
    token_s = 0.0
    quick = False

    async def find_installation(self) -> Installation:
        return Installation(sys.executable, "1", cpu=True)

    def prepare(self, installation: Installation) -> tuple[EngineAddress, list[str], dict[str, str]]:
        key, socket = secrets.token_hex(16), self.folder / "http.sock"
        command = [installation.python, "-m", "penstock.testing.fake_http_server", "--uds", str(socket)]
        command += ["--token-s", str(self.token_s), "--slots", str(self.config.max_concurrent)]
        command += ["--quick"] if self.quick else []
        address = EngineAddress("http://fake", key, str(socket), keep_s=KEEP_S)
        return address, command, {**child_environment(1), KEY_VARIABLE: key}


class FakeHttpWeights(HttpWeights[Manifest]):
    """A version is its number. One with a damaged tensor is refused, see `fake_manifest`."""

    version_path = "/weight_info"
    verifies_late = True

    async def _look(self) -> list[str]:
        return []

    @asynccontextmanager
    async def _fetch(self, manifest: Manifest) -> AsyncGenerator[Manifest]:
        if damaged := next((entry.name for entry in manifest.tensors if not entry.xxh3), None):
            raise WeightsRefused(f"version {manifest.version}: tensor {damaged!r} is missing")
        yield manifest

    async def _pause(self) -> None:
        await self.server.call("POST", "/pause")

    async def _load(self, version: int, fetched: Manifest) -> None:
        await self.server.call("POST", "/load", {"weight_version": str(version)})

    async def _verify(self, fetched: Manifest) -> None:
        if (held := await self.server_version()) != fetched.version:
            raise EngineError(f"the fake server holds version {held}, not {fetched.version}")

    async def _resume(self) -> None:
        await self.server.call("POST", "/resume")

    async def _sleep(self, level: SleepLevel) -> None:
        await self.server.call("POST", "/sleep")

    async def _wake(self) -> None:
        if not self.dropped:
            await self._resume()


class FakeHttpEngine(HttpEngine):
    """Implements `protocol.Engine`."""

    server_class = FakeHttpServer
    weights_class = FakeHttpWeights
    server: FakeHttpServer
    health_path = "/health"
    routes = (GENERATE,)
    sleep_routes = ()

    def __init__(
        self,
        config: RolloutConfig,
        model: str,
        log_dir: Path,
        seed: int,
        *,
        beside: bool = False,
        token_s: float = 0.0,
        quick: bool = False,
    ) -> None:
        """Args:
        token_s: between two tokens of a request.
        quick: the same token always, which costs the server nothing.
        """
        super().__init__(config, model, log_dir, seed, beside=beside)
        self.server.token_s, self.server.quick = token_s, quick

    async def _vocab_size(self) -> int:
        return VOCAB

    async def _try_out(self) -> list[str]:
        return []

    def _check_sampling(self, sampling: Sampling) -> None:
        """Whatever is asked for, a hash is the answer."""

    def _send(self, request: GenerateRequest, seen: Sequence[SeenImage]) -> VLLMStream:
        sampling = request.sampling
        body: dict[str, Any] = {
            "token_ids": request.token_ids,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        return VLLMStream(self.server.events, body, self.labels.version)
