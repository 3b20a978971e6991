"""Settings of a sandbox server (`penstock sandbox`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

DEFAULT_IMAGE = "default"
"""In `warm`: the backend's own default image."""


class CallerConfig(BaseModel):
    """One further token of a sandbox server, and how much its holder may have at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_env: str = Field(min_length=1, description="Environment variable of the server that holds the bearer token.")
    max_boxes: int = Field(8, gt=0, description="Sessions open and waited for at once; further ones are refused (429).")
    max_calls: int = Field(16, gt=0, description="Calls running at once; further ones are refused (429).")


class SandboxServerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    warm: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="Boxes kept ready by image, as {default: 4}; part of `max_boxes`, given up for another image.",
    )
    queue_timeout_s: float = Field(60.0, gt=0, le=120, description="A session waits so long for a free box (then 503).")
    max_calls: int = Field(256, gt=0, description="Calls of the run's own token (PENSTOCK_TOKEN) running at once.")
    callers: dict[str, CallerConfig] = Field(
        default_factory=dict, description="Further tokens by the name of who holds them."
    )
