"""Reads the settings of another framework as dotted keys: a YAML file or a shell script, and overrides.

In a YAML file OmegaConf's ``${a.b}`` and ``${oc.select:a.b,default}`` are followed, and hydra's ``defaults`` that are
files next to it. The YAML file that a script names (``--config-path``, ``--config-name``) is read under its settings.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.deploy.frameworks.table import leaves_of
from penstock.deploy.migrate.script import CONFIG_NAME, CONFIG_PATH, SETTING, ShellScript
from penstock.deploy.migrate.settings import ONE_STEP_OFF, PROGRAM

SHIPPED_CONFIGS: dict[str, dict[str, Any]] = {
    f"{kind}{engine}_trainer": {**of_kind, **of_engine}
    for kind, of_kind in {"ppo": {}, "fully_async_ppo": {}, "one_step_off_ppo": {PROGRAM: ONE_STEP_OFF}}.items()
    for engine, of_engine in {"": {}, "_megatron": {"model_engine": "megatron"}}.items()
}
"""verl's own YAML files by name → where they differ from the defaults of the table."""
PROGRAMS = ("", "main_ppo", "main_dapo", "fully_async_main")
"""The modules of verl whose settings alone say what they do."""


class BadSource(ValueError):
    """The file, an override or a value cannot be read; the text names it."""


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """The settings of a file and overrides."""

    values: Mapping[str, Any]
    """Values by dotted key."""
    notes: Sequence[str] = ()
    """Remarks for a person about how the file was read."""


def read_source(source: Path | None, overrides: Sequence[str]) -> GivenSettings:
    """Overrides win over the file, later ones over earlier ones; ``~a.b`` takes a setting out. Raises `BadSource`."""
    read = GivenSettings({})
    if source is not None:
        try:
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise BadSource(f"{source}: {error.strerror}") from error
        is_script = source.suffix in (".sh", ".bash")
        read = _of_script(text, source) if is_script else GivenSettings(_of_yaml(text, source))
    flat = dict(read.values)
    for override in overrides:
        if override.startswith("~"):
            removed = override[1:].partition("=")[0]
            others = {key: value for key, value in flat.items() if not f"{key}.".startswith(f"{removed}.")}
            if len(others) == len(flat):
                raise BadSource(f"override {override!r}: no such key is given")
            flat = others
            continue
        match = SETTING.fullmatch(override)
        if match is None:
            raise BadSource(f"override {override!r}: write it as a.b=value")
        flat.update(leaves_of(_value(match.group(2)), match.group(1)))
    return GivenSettings({key: _resolved(value, flat) for key, value in flat.items()}, read.notes)


# files ----------------------------------------------------------------------------------------------------------------
def _of_yaml(text: str, path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadSource(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise BadSource(f"{path}: expected settings in sections, found {type(tree).__name__}")
    below: dict[str, Any] = {}
    for name in tree.pop("defaults", None) or ():  # hydra's list of the files that this one is laid over
        if isinstance(name, str) and name != "_self_":
            below |= _of_config([path.parent / f"{name}.yaml"], name) or {}
    return below | dict(leaves_of(tree))


def _of_config(files: Sequence[Path], name: str) -> dict[str, Any] | None:
    """The settings of the first file that is there, else of verl's own file of this name; None: neither is known."""
    for file in files:
        if file.is_file():
            return _of_yaml(file.read_text(encoding="utf-8"), file)
    return SHIPPED_CONFIGS.get(name.removesuffix(".yaml"))


def _of_script(text: str, path: Path) -> GivenSettings:
    script = ShellScript(path.resolve().parent)
    try:
        texts = script.read(text)
    except ValueError as error:
        raise BadSource(f"{path}: {error}") from error
    if script.program.endswith("_trainer"):
        raise BadSource(f"{path}: {script.program} is supervised fine-tuning: see `penstock sft --help`")
    if script.missing:
        why = "".join(f"; {note}" for note in script.notes)
        raise BadSource(f"{path}: nothing sets {', '.join(sorted(script.missing))}: write NAME=(…) into it{why}")
    if not texts:
        raise BadSource(f"{path}: it has no setting a.b=value of main_ppo")
    settings: dict[str, Any] = {}
    folder, name = texts.pop(CONFIG_PATH, ""), texts.pop(CONFIG_NAME, "")
    if name:
        # A script is often started in a folder above its own: a path below the working directory is looked for there
        # too.
        file = Path.cwd() / folder / (name if name.endswith(".yaml") else f"{name}.yaml")
        below = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        named = _of_config([file, *(above / below for above in path.resolve().parents)], name)
        settings = {CONFIG_NAME: str(file)} if named is None else dict(named)  # else an unknown key, which is reported
    if script.program.rpartition(".")[2] not in PROGRAMS or ONE_STEP_OFF in script.program:
        settings[PROGRAM] = script.program
    for key, value in texts.items():
        settings.update(leaves_of(_value(value), key))
    values = ", ".join(f"{key}={value}" for key, value in script.uncertain.items())
    note = (
        f"from branches of {path.name} that may not run when you start it: {values} (check them, and append each "
        "that differs to this command, as KEY=VALUE)"
    )
    return GivenSettings(settings, [*script.notes, *([note] if values else [])])


# values ---------------------------------------------------------------------------------------------------------------
def _value(text: str) -> Any:
    """Return the value as hydra reads it: YAML, and ``1e-6`` is a number."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _resolved(value: Any, flat: Mapping[str, Any]) -> Any:
    """A reference's target, else its default; one that leads nowhere stays as it is written."""
    for _ in range(10):
        reference = re.compile(r"\$\{(?:oc\.(?:select|env):)?\s*([\w.]+)\s*(?:,(.*))?\}", re.DOTALL)
        match = reference.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return value
        key, default = match.group(1), match.group(2)
        if key in flat:
            value = flat[key]
        elif default is not None:
            value = _value(default.strip())
        else:
            return value
    return value
