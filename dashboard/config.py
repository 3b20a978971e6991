"""Settings of the page that `penstock run` starts with a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DashboardConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(False, description="`penstock run` also serves the page that `penstock dashboard` shows.")
    host: str = Field("127.0.0.1", description="Address that the page is served on.")
    port: int = Field(8600, ge=0, le=65535, description="Port of the page; 0: a free one, named in logs/dashboard.log.")
