"""Settings of what a run tells monitors. Spans have none: OpenTelemetry's own variables say all there is to say."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TelemetryConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    metrics: bool = Field(True, description="Agent workers, trainer and `penstock run` serve /metrics too.")
    host: str = Field("127.0.0.1", description="Address on which they do; rollout servers use rollout.host.")
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="First port they try, 32 at most; 0 takes free ones: see prometheus-targets.json.",
    )
