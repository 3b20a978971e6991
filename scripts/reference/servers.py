"""The project's HTTP servers as FastAPI apps, built to be described: no engine, box, model or run is behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI

NOTHING: Any = cast(Any, None)
"""What routes would ask once a request comes; none does."""


@dataclass(frozen=True, slots=True)
class Server:
    title: str
    about: str
    """What starts it and what opens it, in Markdown."""
    make: Callable[[], FastAPI]


def _rollout() -> FastAPI:
    from penstock.gateway import make_router
    from penstock.rollout_server.server.routes import make_routes

    app = make_routes(NOTHING, "MODEL", lambda: None)
    app.include_router(make_router(NOTHING, "http://HOST:PORT", "TOKEN", lambda: 0))
    return app


def _sandbox() -> FastAPI:
    from penstock.sandbox import SandboxConfig
    from penstock.sandbox.server import build_app

    return build_app(NOTHING, SandboxConfig(), "any")


def _dashboard() -> FastAPI:
    from penstock.dashboard import Tokens, make_app
    from penstock.deploy.run.connection import FolderQueues

    runs = Path("runs")
    return _innermost(make_app(runs, FolderQueues(runs, None), Tokens("TOKEN")))


def _reward() -> FastAPI:
    from penstock.rollout_server import Batcher, build_reward_app

    return _innermost(build_reward_app(NOTHING, "TOKEN", "MODEL", batcher=Batcher(lambda _: [])))


def _teacher() -> FastAPI:
    from penstock.rollout_server import Batcher, build_teacher_app

    return _innermost(build_teacher_app(NOTHING, "TOKEN", "MODEL", batcher=Batcher(lambda _: [])))


def _search() -> FastAPI:
    from penstock.tools.retrieval import build_app

    return build_app(NOTHING, "TOKEN")


def _innermost(app: Any) -> FastAPI:
    """The app inside the layers around it."""
    while not isinstance(app, FastAPI):
        app = app.app
    return app


SERVERS: Sequence[Server] = (
    Server(
        "Rollout server",
        "`penstock rollout`; the routes of "
        "[recorded episodes](../guide/agent.md#recorded-episodes-any-openai-client) are among them.",
        _rollout,
    ),
    Server("Sandbox server", "`penstock sandbox`, port 8700; see [sandbox](../how/sandbox.md#the-server).", _sandbox),
    Server(
        "Dashboard",
        "`penstock dashboard`, port 8600; see [dashboard](../guide/monitoring.md). "
        "The page's own data, which change with it.",
        _dashboard,
    ),
    Server(
        "Reward server",
        "`penstock reward-server`, port 8900; see [rewards](../guide/reward.md#a-reward-model).",
        _reward,
    ),
    Server(
        "Teacher server",
        "`penstock teacher-server`, port 8950; see [distillation](../guide/distillation.md).",
        _teacher,
    ),
    Server("Search server", "`penstock search-server`, port 8800; see [tools](../extend/tool.md#search).", _search),
)
