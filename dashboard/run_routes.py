"""What runs wrote: read from their folders, in worker threads."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from penstock.dashboard.access import DATA
from penstock.dashboard.advice import advise
from penstock.dashboard.idle import rollout_idle
from penstock.dashboard.live import Pulse
from penstock.dashboard.metrics import column_names, columns, staleness
from penstock.dashboard.plain import plain
from penstock.dashboard.query import Query as Wanted
from penstock.dashboard.record import page_record
from penstock.dashboard.runs import DEFAULT_PARSER, RunFolders, flat
from penstock.rollout_server import error_response

REFRESH_S = 0.4
"""Of each answer, for reading step files that are new; the page asks again while some are left."""
Points = Annotated[int, Query(ge=10, le=2000)]


class Page(Wanted):
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
        """The resolved recipe by dotted keys."""
        return dict(plain(flat(folders.run(run).config())))

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
        """Who waits, and how to split the devices."""
        files = folders.run(run)
        rows = files.metrics.rows()
        idle = rollout_idle(files, rows, (await pulse.of(run)).get("status"))
        return dict(plain(advise(rows, idle, files.devices)))


def _add_trajectories(router: APIRouter, folders: RunFolders) -> None:
    @router.get("/{run}/trajectories")
    def trajectories(run: str, page: Annotated[Page, Query()]) -> dict[str, Any]:
        """One page of those that match; ``pending`` step files are not read yet."""
        index = folders.run(run).index
        pending = index.refresh(REFRESH_S)
        wanted = Wanted(**page.model_dump(exclude={"offset", "limit"}))
        total, rows = index.page(wanted, page.offset, page.limit)
        return {"total": total, "pending": pending, "generation": index.generation, "rows": rows}

    @router.get("/{run}/trajectory", response_model=None)
    def trajectory(run: str, episode: str, step: int) -> Response:
        """One of them, whole: every run of tokens with its text, logprobs, versions and tool calls."""
        files = folders.run(run)
        record = files.index.record(episode, step)
        if record is None:
            return error_response(404, "episode", f"no trajectory of {episode[:200]!r} at step {step} is recorded")
        parser = str(flat(files.config()).get("agent.parser", DEFAULT_PARSER))
        return JSONResponse(page_record(record, parser))
