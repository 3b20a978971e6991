"""What the list of trajectories is asked for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Order = Literal["step", "reward", "advantage", "tokens", "turns", "latency_s"]


class Query(BaseModel):
    """Every condition must hold; those not given hold for all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field("", max_length=500)
    """Somewhere in what was said, told or answered, or in the episode's name; letters of ASCII match in either case."""
    outcome: str = Field("", max_length=40)
    task: str = Field("", max_length=500)
    source: str = Field("", max_length=200)
    step: int | None = Field(None, ge=0)
    reward_min: float | None = None
    reward_max: float | None = None
    order: Order = "step"
    descending: bool = True

    def sql(self) -> tuple[str, list[object]]:
        """A statement for the ids in order, and its values."""
        conditions: list[tuple[str, object]] = []
        for column in ("outcome", "task", "source", "step"):
            value = getattr(self, column)
            if value not in ("", None):
                conditions.append((f"{column} = ?", value))
        if self.reward_min is not None:
            conditions.append(("reward >= ?", self.reward_min))
        if self.reward_max is not None:
            conditions.append(("reward <= ?", self.reward_max))
        values: list[object] = [value for _, value in conditions]
        texts = [condition for condition, _ in conditions]
        if self.text:
            texts.append(r"(episode LIKE ? ESCAPE '\' OR id IN (SELECT id FROM texts WHERE text LIKE ? ESCAPE '\'))")
            values += [_anywhere(self.text)] * 2
        where = f" WHERE {' AND '.join(texts)}" if texts else ""
        direction = "DESC" if self.descending else "ASC"
        order = f"{self.order} {direction} NULLS LAST, step DESC, offset"
        return f"SELECT id FROM episodes{where} ORDER BY {order}", values  # noqa: S608 - all of it is ours


def _anywhere(text: str) -> str:
    for special in ("\\", "%", "_"):
        text = text.replace(special, f"\\{special}")
    return f"%{text}%"
