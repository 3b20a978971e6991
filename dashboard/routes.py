"""The API of the page: living runs, asked through the queue, and what runs wrote, read in worker threads.

Requeueing a dead letter is the only change that the page can make.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from penstock.common import error_response
from penstock.dashboard.access import DATA
from penstock.dashboard.jsonable import plain
from penstock.dashboard.live import DEADLINE_S, NotAlive, Pulse, decoder_of, letter_line, rollout_idle, whole_letter
from penstock.dashboard.metrics import advise, column_names, columns, staleness
from penstock.dashboard.runs import DEFAULT_PARSER, RunFolders, flat
from penstock.dashboard.trajectories import Query as TrajectoryQuery
from penstock.dashboard.trajectories import page_record
from penstock.transfer_queue.redis import redact

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
        """Dead letters from the `start`-th oldest on; 409 if the run is not running and did not end either."""
        files = folders.run(run)
        try:
            async with asyncio.timeout(DEADLINE_S):
                page = await (await pulse.queue(run)).dead_letters(limit, start)
        except NotAlive:
            ended = await asyncio.to_thread(files.dead_letters)
            if ended is None:
                raise
            return {"start": start, "letters": ended[start : start + limit]}
        return {"start": start, "letters": [letter_line(letter) for letter in page]}

    @router.get("/dead-letter", response_model=None)
    async def letter(run: str, episode: str) -> Response:
        """With its journal, of a run that is running."""
        config = await asyncio.to_thread(folders.run(run).config)
        async with asyncio.timeout(DEADLINE_S):
            dead_letter = await (await pulse.queue(run)).dead_letter(episode)
        if dead_letter is None:
            return error_response(404, "episode", f"{episode[:200]}: no such dead letter")
        decode = await asyncio.to_thread(decoder_of, str(config.get("model", "")))
        return JSONResponse(whole_letter(dead_letter, decode))

    @router.post("/dead-letters/requeue")
    async def requeue(run: str, request: Requeue) -> dict[str, str]:
        """Queue the whole group of an episode again, as it was submitted. Needs the token that may write."""
        folders.run(run)
        async with asyncio.timeout(DEADLINE_S):
            await (await pulse.queue(run)).requeue(request.episode)
        return {"queued": request.episode}

    return router


Points = Annotated[int, Query(ge=10, le=2000)]


class Page(TrajectoryQuery):
    """The list's query, and which part of the answer."""

    offset: int = Field(0, ge=0)
    limit: int = Field(100, ge=0, le=500)


def run_routes(folders: RunFolders, pulse: Pulse) -> APIRouter:
    router = APIRouter(prefix=f"{DATA}runs")

    @router.get("")
    def runs() -> list[dict[str, Any]]:
        """Living ones first, then the newest."""
        return [{"name": name, **folders.run(name).overview()} for name in folders.names()]

    _add_numbers(router, folders, pulse)
    _add_trajectories(router, folders)
    return router


def _add_numbers(router: APIRouter, folders: RunFolders, pulse: Pulse) -> None:
    @router.get("/{run}/config")
    def config(run: str) -> dict[str, Any]:
        """The resolved recipe by dotted keys, without passwords of URLs."""
        leaves = plain(flat(folders.run(run).config()))
        return {key: redact(value) if isinstance(value, str) else value for key, value in leaves.items()}

    @router.get("/{run}/end")
    def end(run: str) -> dict[str, Any]:
        """Returns why a run ended, if it failed, and its summary.json; empty values for one that has not ended."""
        return dict(plain(folders.run(run).end()))

    @router.get("/{run}/accounts")
    def accounts(run: str) -> dict[str, dict[str, float]]:
        """Resource → account → amount: where the cost of the run went so far."""
        return dict(folders.run(run).json_of("accounts.json").get("accounts", {}))

    @router.get("/{run}/metrics")
    def metrics(run: str, name: Annotated[list[str] | None, Query()] = None, points: Points = 400) -> dict[str, Any]:
        """The named columns (`name` as often as wanted), and the names of all there are."""
        rows = folders.run(run).metrics.rows()
        return {"names": column_names(rows), "rows": len(rows), **columns(rows, name or [], points)}

    @router.get("/{run}/staleness")
    def histogram(run: str, points: Points = 100) -> dict[str, Any]:
        """Shares of trained tokens by their age in versions, along the steps."""
        return staleness(folders.run(run).metrics.rows(), points)

    @router.get("/{run}/split")
    async def split(run: str) -> dict[str, Any]:
        """Shares of waiting, and advice on the split of the devices."""
        files = folders.run(run)
        rows = files.metrics.rows()
        idle = rollout_idle(files, rows, (await pulse.of(run)).get("status"))
        return dict(plain(advise(rows, idle, files.devices)))


def _add_trajectories(router: APIRouter, folders: RunFolders) -> None:
    @router.get("/{run}/trajectories")
    def trajectories(run: str, page: Annotated[Page, Query()]) -> dict[str, Any]:
        """One page of those that match; ``pending`` step files are not read yet; ``trained`` episodes there were."""
        files = folders.run(run)
        index = files.index
        # An answer reads new step files for 0.4 s; the page asks again while some are left.
        pending = index.refresh(0.4)
        query = TrajectoryQuery(**page.model_dump(exclude={"offset", "limit"}))
        total, rows = index.page(query, page.offset, page.limit)
        trained = sum(row.get("episodes", 0) for row in files.metrics.rows())
        return {"total": total, "trained": trained, "pending": pending, "generation": index.generation, "rows": rows}

    @router.get("/{run}/image", response_model=None)
    def image(run: str, name: str) -> Response:
        """An image of a recorded trajectory, by the sha256 that the record names it by."""
        data = folders.run(run).image(name)
        # Image formats that a browser draws, by their first bytes. Nothing else is sent: an episode may bring anything.
        kinds = {
            "image/png": b"\x89PNG",
            "image/jpeg": b"\xff\xd8\xff",
            "image/gif": b"GIF8",
            "image/webp": b"RIFF",
            "image/bmp": b"BM",
        }
        kind = next((kind for kind, begins in kinds.items() if data and data.startswith(begins)), None)
        if data is None or kind is None:
            return error_response(404, "name", f"no image {name[:80]!r} is recorded")
        return Response(data, media_type=kind)

    @router.get("/{run}/trajectory", response_model=None)
    def trajectory(run: str, episode: str, step: int) -> Response:
        """One of them, whole: every run of tokens with its text, logprobs, versions and tool calls."""
        files = folders.run(run)
        record = files.index.record(episode, step)
        if record is None:
            return error_response(404, "episode", f"no trajectory of {episode[:200]!r} at step {step} is recorded")
        parser = str(flat(files.config()).get("agent.parser", DEFAULT_PARSER))
        return JSONResponse(page_record(record, parser))
