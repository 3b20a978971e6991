"""Limits of one SWE environment."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SweLimits(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    command_timeout_s: float = Field(
        120.0, gt=0, description="Placing the repository, building, taking the diff: each."
    )
    test_timeout_s: float = Field(60.0, gt=0, description="One test; a longer one has failed and the next one runs.")
    tests_timeout_s: float = Field(1800.0, gt=0, description="All tests of one grading together.")
    patch_bytes: int = Field(1 << 20, gt=0, le=16 << 20, description="A larger patch is not graded: it earns nothing.")
    decoys: int = Field(
        2,
        ge=0,
        le=16,
        description="Further runs of a patch that passes, with wrong expectations in hidden tests, which must fail.",
    )
