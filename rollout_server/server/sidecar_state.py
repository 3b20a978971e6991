"""What a sidecar and the processes beside it say to each other, JSON lines on an inherited socket pair (`child_link`).

    to a process    {"op": "begin", "call", "spec": ProcessSpec}      first; the reply comes when it takes connections
                    {"op": "state", "call" or none, "state": SidecarState}
                    {"op": "count", "call"} · {"op": "end", "call"}
    from it         {"event": "reply", "call", "continuing" | "counts"}

It takes one after the other. A second socket pair brings it connections, each a byte with a descriptor.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.http.answer_labels import EngineState


class ProcessSpec(BaseModel):
    """What a process beside the sidecar is started with. Its secrets are the run's token and, in states, the engine's
    key: what it needs to know its clients and to ask the engine. It gets nothing of the queue's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    server: str
    """The rollout server's name."""
    run: str
    config: RolloutConfig
    model: str
    log_dir: str
    token: str = Field(repr=False)
    engine_class: str
    """``module:class`` of an `HttpEngine`."""
    sidecar_socket: str
    """Where the sidecar takes what is not its own to answer."""
    slots: int
    """Requests that it may have decoded together."""


class SidecarState(BaseModel):
    """What holds for requests that come now."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    accepting: bool
    cause: str
    """Why not."""
    turns_away: bool
    """See `RequestQueue`."""
    engine: EngineState | None
    """None: it runs not, or not yet."""


class ProcessCounts(BaseModel):
    """Of one process, since it began where nothing else is said."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    in_flight: int = 0
    """Now."""
    in_flight_tokens: int = 0
    """Now: prompts and expected answers."""
    silent_s: float | None = None
    """See `RequestQueue.silent_s`; None: it has sampled nothing, and was asked nothing."""
    answered: int = 0
    tokens: float = 0.0
    outcomes: dict[str, float] = {}
    """Requests by outcome."""
    engine_errors: int = 0
    """Answers that failed in the engine."""
    connections: int = 0
    """Open now."""
    accepted: int = 0
    """Connections so far."""
