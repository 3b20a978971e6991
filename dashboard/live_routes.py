"""What living runs' queues say, and the one thing that the page can change: a dead letter's new life."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.dashboard.access import DATA
from penstock.dashboard.decode import decoder_of
from penstock.dashboard.letters import letter_line, whole_letter
from penstock.dashboard.live import DEADLINE_S, Pulse
from penstock.dashboard.runs import RunFolders, flat
from penstock.rollout_server import error_response

LIMITS = ("groups_per_step", "max_staleness", "trainer.steps", "rollout.max_concurrent", "agent.workers")


class Requeue(BaseModel):
    """Body of POST …/dead-letters/requeue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    episode: str = Field(min_length=1, max_length=500)


def live_routes(folders: RunFolders, pulse: Pulse) -> APIRouter:
    router = APIRouter(prefix=f"{DATA}runs/{{run}}")

    @router.get("/live")
    async def live(run: str) -> dict[str, Any]:
        """Queues, servers, waits; and what bounds them."""
        config = flat(await asyncio.to_thread(folders.run(run).config))
        return {**await pulse.of(run), "limits": {name: config.get(name) for name in LIMITS}}

    @router.get("/dead-letters")
    async def letters(
        run: str, start: Annotated[int, Query(ge=0)] = 0, limit: Annotated[int, Query(ge=1, le=500)] = 100
    ) -> dict[str, Any]:
        """From the `start`-th oldest on; 409 where the run does not live."""
        folders.run(run)
        async with asyncio.timeout(DEADLINE_S):
            found = await (await pulse.queue(run)).dead_letters(limit, start)
        return {"start": start, "letters": [letter_line(letter) for letter in found]}

    @router.get("/dead-letter", response_model=None)
    async def letter(run: str, episode: str) -> Response:
        """With its journal."""
        config = await asyncio.to_thread(folders.run(run).config)
        async with asyncio.timeout(DEADLINE_S):
            found = await (await pulse.queue(run)).dead_letter(episode)
        if found is None:
            return error_response(404, "episode", f"{episode[:200]}: no such dead letter")
        decode = await asyncio.to_thread(decoder_of, str(config.get("model", "")))
        return JSONResponse(whole_letter(found, decode))

    @router.post("/dead-letters/requeue")
    async def requeue(run: str, asked: Requeue) -> dict[str, str]:
        """Its whole group is queued again as it was submitted. Needs the token that may write."""
        folders.run(run)
        async with asyncio.timeout(DEADLINE_S):
            await (await pulse.queue(run)).requeue(asked.episode)
        return {"queued": asked.episode}

    return router
