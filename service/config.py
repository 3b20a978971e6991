"""Settings of `penstock serve`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Quota(BaseModel):
    """Limits of one owner; None: unlimited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int | None = Field(None, ge=0, description="Tokens that are trained, scored, prompted with and sampled.")
    steps: int | None = Field(None, ge=0, description="Optimizer steps.")
    adapters: int | None = Field(None, ge=0, description="Models of clients at one time.")
    checkpoint_bytes: int | None = Field(None, ge=0, description="Bytes of checkpoints at one time.")


class ServeConfig(BaseModel):
    """Settings of `penstock serve`."""

    model_config = ConfigDict(extra="forbid")

    quotas: dict[str, Quota] = Field(
        default_factory=dict,
        description="Limits by owner: a name of PENSTOCK_SERVICE_KEYS, or `owner` for the one key that is made; `*`: of"
        " each owner who is not named. tokens and steps count from the service's first start.",
    )
