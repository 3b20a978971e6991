"""Recorded episodes on a rollout server, mounted through `ServerJob.mount`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from penstock.agent_loops import AgentConfig, AgentError, ChatTokens, Teachers, allow_imports_from
from penstock.agent_loops.chat import chat_of, tools_problem, verify_template
from penstock.agent_loops.rewards import RewardFunction, load_reward
from penstock.common import LimitBody
from penstock.gateway.context import GatewayContext, detokenizer, longest_token
from penstock.gateway.errors import ClientErrors, NotRecordable
from penstock.gateway.routes import MAX_BODY_BYTES, make_router
from penstock.gateway.sessions import ApiKeyHeader, SessionManager, opens
from penstock.rollout_server import RolloutClient, Sidecar
from penstock.transfer_queue import RunContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewayJob:
    """Settings of the recording."""

    run: RunContext
    """The last part of `model`, a folder or a hub's name, is the model's name for clients."""
    config: AgentConfig
    request_timeout_s: float


class Gateway:
    """`MountedRoutes`. The first request for an episode loads tokenizer and reward function."""

    def __init__(self, job: GatewayJob, sidecar: Sidecar, url: str) -> None:
        self._job, self._sidecar = job, sidecar
        self._client = RolloutClient(job.run.queue, job.run.token, job.request_timeout_s, home=url)
        self._manager: SessionManager | None = None
        self._reward: RewardFunction | None = None
        self._teachers = Teachers(job.config.teachers) if job.config.teachers else None
        self._loading = asyncio.Lock()
        self.router = make_router(self.manager, url, job.run.token, lambda: sidecar.version)

    def allows(self, path: str, token: str) -> bool:
        """An episode's key opens its own ``/v1/`` routes."""
        return opens(self._job.run.token, path, token)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Limits bodies, takes keys in ``x-api-key``, and gives errors of the server around these routes (401, 404 …)
        the shape that the client reads."""
        return ClientErrors(app, ApiKeyHeader(LimitBody(app, MAX_BODY_BYTES)))

    async def manager(self) -> SessionManager:
        """The session manager, made on first use. Raises `NotRecordable` where tokenizer or reward cannot be used."""
        async with self._loading:
            if self._manager is None:
                self._manager = SessionManager(await self._context(), self._job.run.lease_ttl_s)
                self._manager.start()
        return self._manager

    async def close(self) -> None:
        if self._manager is not None:
            await self._manager.close()
        if self._reward is not None:
            await self._reward.close()
        if self._teachers is not None:
            await self._teachers.close()
        await self._client.close()

    async def _context(self) -> GatewayContext:
        try:
            chat, self._reward = await asyncio.to_thread(self._load)
        except (AgentError, ValueError) as error:
            raise NotRecordable(str(error)) from error
        sidecar = self._sidecar
        return GatewayContext(
            worker=sidecar.name,
            config=self._job.config,
            queue=self._job.run.queue,
            client=self._client,
            chat=chat,
            detokenizer=detokenizer(chat),
            model=Path(self._job.run.model).name or self._job.run.model,
            context_limit=lambda: sidecar.info.max_model_len if sidecar.info else None,
            longest_token=longest_token(chat.tokenizer),
            draining=lambda: sidecar.draining,
            reward=self._reward,
            teachers=self._teachers,
            routing_replay=self._job.run.routing_replay,
        )

    def _load(self) -> tuple[ChatTokens, RewardFunction | None]:
        run, config = self._job.run, self._job.config
        allow_imports_from(run.recipe_dir.resolve())
        chat = chat_of(run.model, config)
        verify_template(chat)
        if problem := tools_problem(chat):
            log.warning("requests with tools are refused: %s", problem)
        return chat, load_reward(config, run.recipe_dir)


def mount(job: GatewayJob) -> partial[Gateway]:
    """The value of `ServerJob.mount`, which is called with the sidecar and its URL."""
    return partial(Gateway, job)
