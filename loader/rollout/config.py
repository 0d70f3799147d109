"""Settings of a coordinator. Imports nothing heavy: the help of a command has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CoordinatorConfig(BaseModel):
    """How a coordinator works."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )

    tick_s: float = Field(default=0.1, gt=0, le=10)
    """Pause between two reads of the registry."""
    lock_ttl_s: float = Field(default=3.0, gt=0, le=60)
    """After so long without a sign of it, another coordinator takes over."""
    settle_s: float = Field(default=2.0, ge=0, le=60)
    """How long nodes are listened to before the missing ones are known; above their heartbeat interval."""
    restore_wait_s: float = Field(default=5.0, ge=0, le=600)
    """How long nodes are given to bring back a desired record that the registry has lost."""
    stage_timeout_s: float = Field(default=3600.0, gt=0, json_schema_extra={"flag": "--stage-timeout TIME"})
    """How long staging may take before a rollout is rolled back."""
    step_timeout_s: float = Field(default=120.0, gt=0, json_schema_extra={"flag": "--step-timeout TIME"})
    """How long every other step may take."""
    step_delay_s: float = Field(0.0, ge=0, le=60, json_schema_extra={"flag": "--step-delay TIME", "file_only": True})
    """Pause before each step, for drills."""
