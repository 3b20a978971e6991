"""Provenance of a model: from its weights over steps and episodes to rows of data, code and policy versions.

    weights ── SHA-256 per file ─┐
    settings, code, data ────────┼──► provenance.json in the model's folder ──► signed by `ssh-keygen -Y sign`
    steps ── SHA-256 per step ───┘

A step's digest covers, for each episode, its row of data, its reward, the versions that sampled it, and its place in a
file of the archive, whose name has the file's own digest: there are the exact tokens with the version of each. That the
weights follow from the steps is what `penstock replay` shows, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common import write_atomically
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import archive_of
from penstock.deploy.run_dir import RunDir

if TYPE_CHECKING:
    from penstock.transfer_queue import Task

RECORD, SIGNATURE = "provenance.json", "provenance.json.sig"
NAMESPACE = "penstock"
"""Namespace of signatures (``ssh-keygen -Y sign -n``): a signature for another purpose is refused."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a check. A model without problems is as it was recorded."""

    steps: int
    episodes: int
    problems: Sequence[str]
    notes: Sequence[str]
    """Comparisons that were not possible, such as of steps that the archive has deleted."""
    signer: str | None
    """Fingerprint of the key that signed the record; None: no valid signature."""


def write_record(config: RunConfig, model: Path) -> Path:
    """Write the record of a run's model and return its path.

    Raises `ConfigError` if the model or the archive is missing, `DataError` if the data are.
    """
    if not model.is_dir():
        raise ConfigError(f"{model}: no model there; a run writes it at its end")
    run = RunDir.of(config)
    steps = _steps(config)
    if not steps:
        raise ConfigError(f"{config.name}: its archive has no committed step (transfer_queue.archive)")
    record = {
        "format": FORMAT,
        "run": config.name,
        "model": digests_of(model),
        "base": {"name": config.model, "files": digests_of(Path(config.model))},
        "settings": digest_of(run.config),
        "code": digests_of(run.code),
        "data": {"file": config.data.train, "digest": _data_digest(config)},
        "steps": steps,
    }
    path = model / RECORD
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    return path


def check_record(model: Path, config: RunConfig | None, signers: Path | None) -> Findings:
    """Compare the record in a model's folder with the model and, if `config` is given, with its run.

    `signers`: a file of public keys, one per line, one of which must have signed; None: any key may have. Raises
    `ConfigError` if the record is missing or cannot be read.
    """
    record = read_record(model)
    problems = [*_differences("model", record["model"], digests_of(model))]
    notes: list[str] = []
    if config is None:
        notes.append("the run is not here: its steps, data and code were not compared (--run)")
    else:
        problems += _of_run(record, config, notes)
    signer, refusal = _signer(model, signers)
    problems += [refusal] if refusal else []
    episodes = sum(sum(step["rows"].values()) for step in record["steps"])
    return Findings(len(record["steps"]), episodes, problems, notes, signer)


def read_record(model: Path) -> dict[str, Any]:
    """Raises `ConfigError`."""
    path = model / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = record["format"] == FORMAT
    except FileNotFoundError:
        raise ConfigError(f"{path}: no record; `penstock prove RUN --record` writes it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not known:
        raise ConfigError(f"{path}: format {record['format']} is unknown; this build reads format {FORMAT}")
    return record


def steps_of_task(record: Mapping[str, Any], task: Task) -> list[int]:
    """Return the steps that trained episodes of this task's row."""
    digest = row_digest(task)
    return [step["step"] for step in record["steps"] if digest in step["rows"]]


def row_digest(task: Task) -> str:
    """Return a digest of everything that a task has from its row."""
    fields = [task.messages, task.data_source, task.ground_truth, task.agent_name, task.extra_info]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def digest_of(file: Path) -> str:
    """SHA-256 of a file. Raises `OSError`."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, without the record's own; nothing for a name on a hub."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (RECORD, SIGNATURE))
    return {str(path.relative_to(folder)): digest_of(path) for path in files}


def _steps(config: RunConfig) -> list[dict[str, Any]]:
    """Raises `DataError` if the data have fewer rows now."""
    from penstock.trainer import tasks_again

    index = archive_of(config).index().to_pylist()
    tasks = tasks_again(config.data, config.seed, {row["task"] for row in index})
    rows = {name: row_digest(task) for name, task in tasks.items()}
    lines = defaultdict[int, list[list[Any]]](list)
    for row in index:
        fields = ("episode", "file", "row", "reward", "oldest_version", "newest_version")
        lines[row["step"]].append([rows[row["task"]], *(row[name] for name in fields)])
    return [
        {
            "step": step,
            "digest": hashlib.sha256(json.dumps(of_step).encode()).hexdigest(),
            "rows": Counter(line[0] for line in of_step),
        }
        for step, of_step in sorted(lines.items())
    ]


def _data_digest(config: RunConfig) -> str:
    path = Path(config.data.train)
    return digest_of(path) if path.is_file() else hashlib.sha256(json.dumps(digests_of(path)).encode()).hexdigest()


def _differences(what: str, recorded: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(recorded.keys() | now.keys()):
        if name not in now:
            yield f"{what}: {name} is missing"
        elif name not in recorded:
            yield f"{what}: {name} is not in the record"
        elif recorded[name] != now[name]:
            yield f"{what}: {name} has other bytes than in the record"


def _of_run(record: Mapping[str, Any], config: RunConfig, notes: list[str]) -> Iterator[str]:
    run = RunDir.of(config)
    yield from _differences("code", record["code"], digests_of(run.code))
    base = digests_of(Path(config.model))
    if base and record["base"]["files"]:
        yield from _differences("base model", record["base"]["files"], base)
    else:
        notes.append(f"base model: {config.model} is not a folder here, its bytes were not compared")
    if record["settings"] != digest_of(run.config):
        yield f"settings: {run.config.name} has other bytes than in the record"
    if record["data"]["digest"] != _data_digest(config):
        yield f"data: {config.data.train} has other bytes than in the record"
    yield from (f"archive: {fault}" for fault in archive_of(config).verify())
    recorded, now = ({step["step"]: step["digest"] for step in steps} for steps in (record["steps"], _steps(config)))
    if pruned := [step for step in recorded if step < min(now, default=0)]:
        notes.append(f"the archive has no step below {min(now)} any more: {len(pruned)} steps were not compared")
    for step in sorted((recorded.keys() | now.keys()) - set(pruned)):
        if now.get(step) != recorded.get(step):
            yield f"step {step}: its episodes are not those of the record"


def _signer(model: Path, signers: Path | None) -> tuple[str | None, str]:
    """Return the fingerprint of the key that signed the record, and the problem with the signature ("" for none).

    Raises `ConfigError` for a file of signers that cannot be read.
    """
    path = model / SIGNATURE
    if not path.exists():
        return None, f"{SIGNATURE} is missing, and --signers asks for a signature" if signers else ""
    try:
        import sshsig
    except ImportError:
        return None, f"{SIGNATURE} cannot be checked without sshsig: pip install 'penstock[prove]'"
    try:
        lines = [line.strip() for line in signers.read_text(encoding="utf-8").splitlines()] if signers else []
        known = [sshsig.PublicKey.from_openssh_str(line) for line in lines if line and line[0] != "#"]
    except OSError as error:
        raise ConfigError(f"--signers {signers}: {error.strerror}") from error
    except (ValueError, NotImplementedError) as error:  # no key, or one of another type
        raise ConfigError(
            f"--signers {signers}: a line is no public key of type ssh-ed25519 or ssh-rsa: {error}"
        ) from error
    try:
        key = sshsig.check_signature((model / RECORD).read_bytes(), path.read_text(encoding="utf-8"), NAMESPACE)
    # ValueError: no signature at all. NotImplementedError: a kind of key or hash that sshsig does not check.
    except (sshsig.InvalidSignature, ValueError, NotImplementedError) as error:
        return None, f"{SIGNATURE} is not a signature of this record: {error}"
    if signers is not None and key not in known:
        return None, f"{SIGNATURE}: the key {key.sha256_str()} is not in {signers}"
    return key.sha256_str(), ""
