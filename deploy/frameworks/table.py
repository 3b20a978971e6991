"""Names of verl's settings and ours, read from `names/`; a page renders the same rows.

`names/verl.yaml` has the rows, `names/verl.txt` every setting that verl itself has, one a line: a row with a ``*`` must
not excuse a setting that is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

FOLDER = Path(__file__).with_name("names")
ABSENT = "absent"
"""Default of a setting that verl gives no value."""


class Name(BaseModel):
    """One row. A ``*`` in `theirs` stands for anything; at its end it may stand in `ours` for the same."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    theirs: str = Field(description="The setting's name there, or a pattern.")
    kind: Literal["copy", "computed", "always", "none"] = Field(alias="is", description="How it is carried over.")
    ours: str = Field("", description="The setting here; of several keys the first.")
    default: Any = Field(ABSENT, description="Its value there where none is given.")
    values: dict[str, Any] = Field(default_factory=dict, description="Their values → ours; none: the same.")
    fine: list[Any] = Field(default_factory=list, description="Of `none`: values at which nothing is lost.")
    note: str = Field("", description="How it differs, or what to do instead.")

    @model_validator(mode="after")
    def _check(self) -> Name:
        if (self.kind in ("copy", "computed")) != bool(self.ours):
            raise ValueError(f"{self.theirs}: is {self.kind} and names {self.ours or 'nothing'} as ours")
        return self

    def names(self, key: str) -> bool:
        return self.theirs == key or ("*" in self.theirs and fnmatchcase(key, self.theirs))

    def our_key(self, key: str) -> str:
        return self.ours.removesuffix("*") + key[len(self.theirs) - 1 :] if self.ours.endswith("*") else self.ours


class Table(BaseModel):
    """All rows. The first that fits a key holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="verl and its version.")
    names: list[Name]
    known: frozenset[str] = Field(frozenset(), description="Every setting that verl has.")

    def find(self, key: str) -> Name | None:
        return next((name for name in self.names if name.names(key)), None)

    def knows(self, key: str) -> bool:
        """verl has this setting, or a row names it to its end."""
        return key in self.known or any(name.names(key) and not name.theirs.endswith("*") for name in self.names)

    def default(self, key: str) -> Any:
        """verl's default for `key`; None if it has none."""
        entry = self.find(key)
        return None if entry is None or entry.default == ABSENT else entry.default


@lru_cache
def verl_table() -> Table:
    rows = yaml.safe_load((FOLDER / "verl.yaml").read_text(encoding="utf-8"))
    known = (FOLDER / "verl.txt").read_text(encoding="utf-8").split()
    return Table.model_validate({**rows, "known": known})


def verl_hint(key: str, value: Any) -> str:
    """Return ``; verl's trainer.save_freq is trainer.checkpoint_every here``; an empty text if verl has no such key.

    `value` of a section has the keys below `key`.
    """
    table = verl_table()
    rows = {one: name for one, _ in leaves_of(value, key) if (name := table.find(one)) is not None}
    known = {one: name for one, name in rows.items() if name.kind == "copy" or table.knows(one)}
    if not known:
        return ""
    theirs, name = next(iter(known.items()))
    if len(known) == 1 and name.ours:
        return f"; verl's {theirs} is {name.our_key(theirs)} here"
    return "; a setting of verl: `penstock config from-verl` converts it, or names what to do instead"


def leaves_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of what is below `key`, or of `key` itself if `value` is not a section."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves_of(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
