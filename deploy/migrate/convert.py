"""Conversion of another framework's settings to a recipe, with an account of every key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from penstock.deploy.config import RunConfig, parse_config
from penstock.deploy.frameworks.table import Table, verl_table
from penstock.deploy.migrate.algorithm_rules import ALGORITHM_RULES
from penstock.deploy.migrate.run_rules import RUN_RULES
from penstock.deploy.migrate.script import COMMAND
from penstock.deploy.migrate.settings import VerlSettings
from penstock.deploy.migrate.source import BadSource, GivenSettings
from penstock.deploy.recipe_tree import set_key

SHORT_CHARS = 60


@dataclass(frozen=True, slots=True)
class Unmapped:
    """A key that was given and has no counterpart."""

    key: str
    value: Any
    why: str


@dataclass(slots=True)
class KeyAccount:
    """Every key that was given is in exactly one of the three."""

    mapped: dict[str, str] = field(default_factory=dict)
    """Their key → ours."""
    unmapped: list[Unmapped] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    """Their key → why nothing is lost without it."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A recipe, and the outcome of each key."""

    recipe: Mapping[str, Any]
    account: KeyAccount
    notes: Sequence[str]
    """Remarks for a person about the converted settings."""

    def yaml(self) -> str:
        """The recipe, with what a person must look at as comments in front."""
        remarks = [f"# {one}" for one in self.notes]
        lost = [f"# not taken over: {one.key}={_short(one.value)} ({one.why})" for one in self.account.unmapped]
        return "\n".join([*remarks, *lost, yaml.safe_dump(dict(self.recipe), sort_keys=False, allow_unicode=True)])

    def check(self) -> RunConfig:
        """Raises `ConfigError` where the recipe is none. A tool file that is not on this machine is not asked."""
        tools = self.recipe.get("tools")
        elsewhere = isinstance(tools, str) and not Path(tools).is_file()
        return parse_config({**self.recipe, **({"tools": []} if elsewhere else {})}, source="the recipe that was made")


def migrate(given: GivenSettings) -> Migration:
    """Convert settings to a recipe. Settings that are not given have verl's defaults, not ours.

    Raises `BadSource` where a value that must be a number is none.
    """
    table, account = verl_table(), KeyAccount()
    notes = list(given.notes)
    flat: dict[str, Any] = {}
    for key, text in given.values.items():
        value = COMMAND.sub("", text) if key == "trainer.experiment_name" and isinstance(text, str) else text
        if value != text:
            notes.append(f"{key}={text}: what a command of the script makes is left out of the name")
        if isinstance(value, str) and COMMAND.search(value):
            why = f"a command of the script makes it, which is not run: give {key}=VALUE"
            account.unmapped.append(Unmapped(key, value, why))
            continue
        if isinstance(value, str) and "$" in value and table.knows(key) and isinstance(table.default(key), int | float):
            raise BadSource(f"{key}={value}: its variable is not set: give {key}=NUMBER")
        if re.search(r"\$\{?\w", str(value)) and table.knows(key):
            notes.append(f"{key}={value}: its variable is not set: give {key}=VALUE, or correct it in the recipe")
        flat[key] = value
    settings = dict(_defaults(flat, table))
    for key, value in flat.items():
        _enter(key, value, table, account, settings)
    verl = VerlSettings(flat, table)
    for rule in (*RUN_RULES, *ALGORITHM_RULES):
        try:
            settings.update(rule(verl))
        except (TypeError, ValueError) as error:
            raise BadSource(f"a value that makes the recipe's {rule.__name__} cannot be read: {error}") from error
    return Migration(_nested(settings), account, [*notes, *verl.notes, *_settle(verl, account)])


def _settle(verl: VerlSettings, account: KeyAccount) -> Iterator[str]:
    """Enter what the rules found about keys that were given; notes about verl's defaults."""
    for key in [key for key in account.mapped if key in verl.ours]:
        account.mapped[key] = verl.ours[key]
    for key in [key for key in account.mapped if key in verl.unused]:
        del account.mapped[key]
        account.ignored[key] = verl.unused[key]
    for key, why in verl.lost.items():
        account.mapped.pop(key, None)
        account.ignored.pop(key, None)
        if verl.has(key):
            account.unmapped.append(Unmapped(key, verl[key], why))
        else:
            yield f"{key}={verl[key]} is verl's default: {why}"


def _enter(key: str, value: Any, table: Table, account: KeyAccount, settings: dict[str, Any]) -> None:
    name = table.find(key)
    if name is None or (name.kind == "always" and not table.knows(key)):
        account.unmapped.append(Unmapped(key, value, f"not a setting of {table.source} that is known here"))
    elif name.kind == "none" and value not in name.fine:
        account.unmapped.append(Unmapped(key, value, name.note))
    elif name.kind in ("always", "none"):
        account.ignored[key] = name.note
    elif name.kind == "computed":
        account.mapped[key] = name.ours
    elif value is None or value == {}:
        account.ignored[key] = "not set"
    elif name.values and value not in name.values:
        why = f"{name.ours} is one of {', '.join(map(str, name.values.values()))}"
        account.unmapped.append(Unmapped(key, value, why))
    else:
        settings[name.our_key(key)] = name.values[value] if name.values else value
        account.mapped[key] = name.our_key(key)


def _defaults(flat: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Return the other framework's defaults of settings that are copied and not set: ours may differ."""
    rows = [name for name in table.names if name.kind == "copy" and "*" not in name.theirs and name.theirs not in flat]
    defaults = {name.ours: table.default(name.theirs) for name in rows}
    return {key: value for key, value in defaults.items() if value is not None}


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as a tree, in the order of a recipe's sections."""
    tree: dict[str, Any] = {}
    order = list(RunConfig.model_fields)
    for dotted in sorted(settings, key=lambda key: order.index(key.partition(".")[0])):
        set_key(tree, dotted, settings[dotted], "the recipe that was made")
    return tree


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHORT_CHARS else f"{text[: SHORT_CHARS - 3]}..."
