"""Recorded episodes on a rollout server: what `ServerJob.mount` is given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import APIRouter

from penstock.agent_loops import AgentConfig, AgentError, ChatTokens, allow_imports_from
from penstock.agent_loops.chat import chat_of, verify_template
from penstock.agent_loops.rewards import RewardFunction, load_reward
from penstock.gateway.context import CaptureParts, text_of
from penstock.gateway.errors import NotRecordable
from penstock.gateway.routes import make_router
from penstock.gateway.sessions import Desk, opens
from penstock.rollout_server import RolloutClient, Sidecar
from penstock.transfer_queue import TransferQueue


@dataclass(frozen=True)
class CaptureJob:
    """What a rollout server must know to record episodes. The queue stays its opener's to close."""

    config: AgentConfig
    queue: TransferQueue
    model: str
    """Folder or hub name of the tokenizer; also what clients call the model."""
    token: str
    """The run's."""
    lease_ttl_s: float
    request_timeout_s: float
    recipe_dir: Path = Path()
    """Where files named in the recipe are looked for first."""


class Capture:
    """`Mounted`. Tokenizer and reward function are loaded when the first episode is asked for."""

    def __init__(self, job: CaptureJob, sidecar: Sidecar, url: str) -> None:
        self._job, self._sidecar = job, sidecar
        self._client = RolloutClient(job.queue, job.token, job.request_timeout_s, home=url)
        self._desk: Desk | None = None
        self._reward: RewardFunction | None = None
        self._loading = asyncio.Lock()
        self._router = make_router(self.desk, url, job.token, lambda: sidecar.version)

    @property
    def router(self) -> APIRouter:
        return self._router

    def allows(self, path: str, token: str) -> bool:
        """An episode's own key opens its paths."""
        return opens(self._job.token, path, token)

    async def desk(self) -> Desk:
        """Raises `NotRecordable` where the model's tokenizer or the recipe's reward cannot be used."""
        async with self._loading:
            if self._desk is None:
                self._desk = Desk(await self._parts(), self._job.lease_ttl_s)
                self._desk.start()
        return self._desk

    async def close(self) -> None:
        if self._desk is not None:
            await self._desk.close()
        if self._reward is not None:
            await self._reward.close()
        await self._client.close()

    async def _parts(self) -> CaptureParts:
        try:
            chat, self._reward = await asyncio.to_thread(self._load)
        except (AgentError, ValueError) as error:
            raise NotRecordable(str(error)) from error
        sidecar = self._sidecar
        return CaptureParts(
            worker=sidecar.name,
            config=self._job.config,
            queue=self._job.queue,
            client=self._client,
            chat=chat,
            text_of=text_of(chat, self._job.config.parser),
            model=self._job.model,
            context_limit=lambda: sidecar.info.max_model_len if sidecar.info else None,
            draining=lambda: sidecar.draining,
            reward=self._reward,
        )

    def _load(self) -> tuple[ChatTokens, RewardFunction | None]:
        job = self._job
        allow_imports_from(job.recipe_dir.resolve())
        chat = chat_of(job.model, job.config)
        verify_template(chat)
        return chat, load_reward(job.config, job.recipe_dir)


def mount(job: CaptureJob) -> partial[Capture]:
    """For `ServerJob.mount`: called with the sidecar and its own URL."""
    return partial(Capture, job)
