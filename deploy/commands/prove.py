"""`penstock prove`: what a model was made of, and whether that is still so."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.commands.shared import AsJson, load_run, refuse, run_or_path, user_errors
from penstock.deploy.config import RUN_FILE, RunConfig
from penstock.deploy.recipe_tree import ConfigError


def prove(
    model: Annotated[Path, typer.Argument(help="A run's name or folder, or a model's folder.", metavar="RUN|MODEL")],
    *,
    record: Annotated[bool, typer.Option("--record", help="Write the record of a run's final_model.")] = False,
    row: Annotated[
        int | None,
        typer.Option(min=0, help="Say in which steps this row of data.train was trained; rows count from 0."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="The run of a model that was moved.")] = None,
    signers: Annotated[
        Path | None, typer.Option(help="A file of public keys, one per line; one of them must have signed the record.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model with its record: weights, steps and their episodes, rows of data, code, settings, signature.

    What differs is named, down to one byte and one episode, and the status is 1.

    Examples: penstock prove calculator --record

    ssh-keygen -Y sign -n penstock -f ~/.ssh/id_ed25519 runs/calculator/final_model/provenance.json

    penstock prove calculator --signers team.pub

    penstock prove calculator --row 17
    """
    from penstock.deploy.provenance import check_record, read_record, steps_of_task, write_record
    from penstock.trainer import DataError, load_rows
    from penstock.transfer_queue import BadPayload

    with user_errors(BadPayload, DataError, OSError):
        folder, config = _place(model, run)
        if record:
            path = write_record(_needed(config, model), folder)
            print(f"{path} is written; sign it: ssh-keygen -Y sign -n penstock -f ~/.ssh/id_ed25519 {path}")
            return
        if row is not None:
            data = _needed(config, model).data.train
            rows = load_rows(data)
            if row >= len(rows):
                refuse(f"--row {row}: {data} has {len(rows)} rows")
            steps = steps_of_task(read_record(folder), rows[row].task("", "train"))
            where = f"trained in steps {', '.join(map(str, steps))}" if steps else "in no trained step"
            print(json.dumps({"row": row, "steps": steps}) if as_json else f"row {row}: {where}")
            return
        findings = check_record(folder, config, signers)
    if as_json:
        print(json.dumps(asdict(findings)))
    else:
        for line in (*findings.notes, *findings.problems):
            print(line)
        signed = f"signed by {findings.signer}" if findings.signer else "not signed"
        verdict = f"{len(findings.problems)} problems" if findings.problems else "as recorded"
        print(f"{folder}: {verdict}; {findings.steps} steps, {findings.episodes} episodes; {signed}")
    raise typer.Exit(1 if findings.problems else 0)


def _place(model: Path, run: Path | None) -> tuple[Path, RunConfig | None]:
    """The model's folder, and the settings of its run; None where the run is not known. Raises `ConfigError`."""
    place = run_or_path(model)
    root = run or next((one for one in (place, place.parent) if (one / RUN_FILE).is_file()), None)
    folder = place / "final_model" if root == place else place
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no model there")
    return folder, None if root is None else load_run(root)


def _needed(config: RunConfig | None, model: Path) -> RunConfig:
    if config is None:
        raise ConfigError(f"{model}: its run is not there; name it by --run")
    return config
