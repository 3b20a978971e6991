"""Identity of a run: its id, its model, the settings that changed since it began.

run.id in the run's folder ─► RunIdentity ─► create_run: another run of this name in the queue is refused
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.common import write_atomically
from penstock.deploy.config import RunConfig, dump_config
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run_dir import RunDir
from penstock.trainer import DataError, dataset_digest
from penstock.transfer_queue import RunIdentity, RunRecord, Status
from penstock.transfer_queue.redis import redact


def identity_of(config: RunConfig, run: RunDir) -> RunIdentity:
    """The id is made with the run's folder. Of the model only its name counts: folders differ between machines."""
    if not run.identity.exists():
        write_atomically(run.identity, secrets.token_hex(8) + "\n", mode=0o600, durable=True)
    digest = hashlib.sha256(dump_config(config).encode()).hexdigest()
    return RunIdentity(run.identity.read_text().strip(), digest[:16], Path(config.model).name)


def refuse_another_model(run: RunDir, config: RunConfig) -> None:
    """Raises `ConfigError`. Of a model only its name counts, as in `identity_of`."""
    if not run.config.exists():
        return
    began = yaml.safe_load(run.config.read_text())["model"]
    if Path(began).name != Path(config.model).name:
        began = run.root / began if (run.root / began).exists() else began
        raise ConfigError(
            f"model: run {run.root.name} began with {began}, and this command has {config.model}; add model={began}, "
            f"or continue the run by its folder: penstock run {run.root} --resume"
        )


def dataset_digests(config: RunConfig) -> dict[str, str]:
    """Return the digest of the files of ``data.train`` and ``data.eval``, by setting. Raises `ConfigError`.

    A dataset that is not on this machine has none: the trainer reads it, perhaps elsewhere.
    """
    paths = {"data.train": config.data.train, "data.eval": config.data.eval}
    try:
        return {key: dataset_digest(path) for key, path in paths.items() if path and Path(path).exists()}
    except (DataError, OSError) as error:
        raise ConfigError(f"data: {error}") from error


def changed_settings(run: RunDir, config: RunConfig, datasets: Mapping[str, str] | None = None) -> list[str]:
    """``KEY: OLD → NEW`` of each setting in which the run's file differs, and the Python files and datasets that were
    edited.

    A moved folder is not a change. `datasets`: see `dataset_digests`; None compares none.
    """
    if not run.config.exists():
        return []
    old, new = (_leaves(yaml.safe_load(text)) for text in (run.config.read_text(), dump_config(config, run.root)))
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key, "unset") != new.get(key, "unset")]
    changes = (f"{key}: {old.get(key, 'unset')} → {new.get(key, 'unset')}" for key in keys)
    known = json.loads(run.datasets.read_text()) if run.datasets.exists() else {}
    edited = [str(file) for file in run.changed_code(config)]
    edited += [key for key, digest in (datasets or {}).items() if known.get(key, digest) != digest and key not in keys]
    return [*map(redact, changes), *(f"{name}: edited since" for name in edited)]  # URLs may have passwords


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in settings.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def describe_found(record: RunRecord | None, status: Status, identity: RunIdentity, changes: Sequence[str] = ()) -> str:
    """Describe the run that `--resume` continues, in one line. `changes`: see `changed_settings`."""
    if record is None:
        return f"run {identity.run_id}: it is new in this queue; it continues from a checkpoint if there is one"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() - record.age_s))
    again = status.step - status.committed_step
    line = f"run {identity.run_id}, begun {since}: its checkpoint has {status.committed_step} steps" + (
        f"; {again} more {'is' if again == 1 else 'are'} recorded and trained again" if again else ""
    )
    if not changes:
        return line
    line += f"; its settings have changed ({', '.join(changes)})"
    # Settings that decide which row has which place in the data stream.
    if any(change.startswith(f"{key}: ") for change in changes for key in ("seed", "data.train", "data.shuffle")):
        line += "; rows come in another order from here on: some of this epoch are repeated, others left out"
    return line
