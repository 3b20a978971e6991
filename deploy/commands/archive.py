"""`penstock archive`: what a run trained on, batch by batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.common.registry import near_and_known
from penstock.deploy.commands.shared import RUNS, AsJson, RunName, RunsDir, folder_of_run, load_run, user_errors
from penstock.deploy.recipe_tree import ConfigError
from penstock.transfer_queue import BadPayload, same_reward

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.transfer_queue import Archive, Trajectory

app = typer.Typer(
    help="What a run trained on, batch by batch: list, read, export, verify, prune.", no_args_is_help=True
)
Where = Annotated[
    list[str] | None,
    typer.Option("--where", help="COLUMN=VALUE, or <, <=, >, >= in place of =; several must all hold."),
]
SUMS = {
    ("reward", "mean"): "reward_mean",
    ("reward", "min"): "reward_min",
    ("reward", "max"): "reward_max",
    ("tokens", "sum"): "tokens",
    ("oldest_version", "min"): "oldest_version",
    ("learned", "min"): "learned",
}


@app.command("ls")
def list_batches(
    run: RunName,
    where: Where = None,
    by: Annotated[
        str, typer.Option(help="A column of the index: step, task, episode, data_source, outcome …")
    ] = "step",
    runs_dir: RunsDir = RUNS,
    *,
    as_json: AsJson = False,
) -> None:
    """One line per step, or per value of another column: episodes, rewards, sampled tokens, oldest version.

    `step` counts from 0, from 1 on the terminal. `learned` is 0 where no checkpoint has the step: it is newer than the
    last one, or the run diverged at it.

    Examples: penstock archive ls calculator
    penstock archive ls calculator --by episode --where step=12 --where "reward<0.5"
    """
    with user_errors(BadPayload):
        rows = chosen(listed(opened(run, runs_dir)), where or [])
        if by not in rows.column_names:
            raise ConfigError(f"--by {by}: no column of the index; one of {', '.join(rows.column_names)}")
    lines = _sums(rows, by).to_pylist()
    if as_json:
        print(json.dumps(lines))
        return
    print("  ".join(lines[0]) if lines else "no committed batch")
    for line in lines:
        print("  ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in line.values()))


def _sums(rows: pa.Table, by: str) -> pa.Table:
    """A row per value of the column `by`."""
    sums = {("row", "count"): "episodes", **SUMS}
    if by == "episode":
        alone = {one: name for one, name in SUMS.items() if one[0] != "reward"}
        sums = {("row", "count"): "episodes", ("task", "first"): "task", ("reward", "mean"): "reward", **alone}
    sums = {one: name for one, name in sums.items() if one[0] != by}
    table = rows.group_by([by], use_threads=False).aggregate(list(sums))
    names = {f"{column}_{how}": name for (column, how), name in sums.items()}
    return table.rename_columns([names.get(name, name) for name in table.column_names])


@app.command()
def show(
    run: RunName,
    episode: Annotated[str, typer.Argument(help="As `penstock archive ls --by episode` lists it.")],
    runs_dir: RunsDir = RUNS,
    *,
    as_json: AsJson = False,
) -> None:
    """Read one episode as the trainer saw it: prompt, sampled runs with their versions, what tools answered."""
    with user_errors(BadPayload):
        record = record_of(run, runs_dir, episode)
    if as_json:
        print(json.dumps(record))
        return
    outcome = " ".join(filter(None, record["outcome"].values()))
    learned = "" if record["learned"] else "  in no checkpoint: not learned"
    instance = f"  {record['extra']['instance_id']}" if "instance_id" in record["extra"] else ""
    print(f"{episode}{instance}  step {record['step']}  reward {record['reward']}  {outcome}{learned}")
    for segment in record["segments"]:
        print(f"── prompt, {segment['prompt_tokens']} tokens\n{segment['prompt']}")
        for part in segment["runs"]:
            versions = ", ".join(str(version) for version, _ in part.get("versions", []))
            source = f"sampled by version {versions}" if part["mask"] else "fed"
            print(f"── {source}, {part['tokens']} tokens\n{part['text']}")


@app.command()
def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(help="A folder, which gets trajectories/ as a run has.")],
    where: Where = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write episodes as recorded trajectories, with ids and texts: readable, and data for `penstock sft`.

    Example: penstock archive export calculator best --where "reward>=1" && penstock sft RECIPE sft.runs=best
    """
    with user_errors(BadPayload):
        episodes = records(run, runs_dir, [*(where or []), "learned=1"])
        if not episodes:
            which = f"with {' and '.join(where)}" if where else "yet"
            raise ConfigError(f"{run}: no checkpoint has an episode {which}; nothing was written")
        if (out / "trajectories").exists():
            raise ConfigError(f"{out / 'trajectories'} is there already: remove it, or export to another folder")
    folder = out / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in episodes:
        by_step.setdefault(record["step"], []).append(record)
    for step, lines in by_step.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"step_{step:06d}.jsonl").write_text(text, encoding="utf-8")
    print(f"{len(episodes)} episodes of {len(by_step)} steps are in {folder}")


@app.command()
def verify(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """Read every file and compare it with its digest and the index; status 1 where something is wrong."""
    with user_errors():
        archive = opened(run, runs_dir)
    faults = archive.verify()
    for fault in faults:
        print(fault)
    print(f"{archive.folder}: {len(faults)} faults in {len(archive.steps())} steps")
    raise typer.Exit(1 if faults else 0)


@app.command()
def prune(
    run: RunName,
    max_bytes: Annotated[int, typer.Option(min=0, help="The oldest steps go until the archive has at most so much.")],
    runs_dir: RunsDir = RUNS,
) -> None:
    """Delete the oldest steps of a run that is not training. This cannot be undone."""
    from penstock.common import FileLock

    with user_errors(BadPayload):
        archive = opened(run, runs_dir)
        lock = FileLock(folder_of_run(run, runs_dir) / "trainer.lock", "its trainer is running", error=ConfigError)
        if not lock.try_acquire():
            raise ConfigError(f"{run}: its trainer is running, and prunes by transfer_queue.archive_bytes")
        try:
            gone = archive.prune(max_bytes)
        finally:
            lock.release()
    print(f"{len(gone)} steps deleted, {len(archive.steps())} left")


def opened(run: str, runs_dir: Path) -> Archive:
    """Return the archive of a run. Raises `ConfigError`."""
    from penstock.deploy.run.connection import archive_of

    return archive_of(load_run(folder_of_run(run, runs_dir)))


def listed(archive: Archive) -> pa.Table:
    """Return the index and what is archived after it, with the column `learned`. Raises `BadPayload`."""
    import pyarrow as pa

    tables = (archive.pending(), archive.index())
    return pa.concat_tables(
        [table.append_column("learned", pa.array([n] * len(table), pa.int8())) for n, table in enumerate(tables)][::-1]
    )


def chosen(index: pa.Table, where: Sequence[str]) -> pa.Table:
    """Return the rows for which every condition of `where` holds. Raises `ConfigError`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    functions = {"<=": "less_equal", ">=": "greater_equal", "=": "equal", "<": "less", ">": "greater"}
    for condition in where:
        match = re.fullmatch(r"(\w+)\s*(<=|>=|=|<|>)\s*(.*)", condition)
        if match is None:
            raise ConfigError(f"--where {condition!r}: write COLUMN=VALUE (or <, <=, >, >=)")
        column, comparison, value = match.groups()
        if column not in index.column_names:
            raise ConfigError(f"--where {condition!r}: no column; {near_and_known(column, index.column_names)}")
        try:
            typed = value if pa.types.is_string(index.schema.field(column).type) else float(value)
        except ValueError as error:
            raise ConfigError(f"--where {column}{comparison}{value}: {column} is a number") from error
        values = index[column]
        if column == "reward" and isinstance(typed, float):  # those that rounding alone tells from the bound equal it
            equal = pa.array([same_reward(one, typed) for one in values.to_pylist()], pa.bool_())
            values = pc.if_else(equal, typed, values)
        index = index.filter(pc.call_function(functions[comparison], [values, pa.scalar(typed)]))
    return index


def record_of(run: str, runs_dir: Path, episode: str) -> dict[str, Any]:
    """Return an episode as `records` does. Raises `ConfigError`, `BadPayload`."""
    record = next(iter(records(run, runs_dir, [f"episode={episode}"])), None)
    if record is None:
        raise ConfigError(f"{episode}: not in the archive of {run}; `penstock archive ls {run} --by episode` lists it")
    return record


def records(run: str, runs_dir: Path, where: Sequence[str]) -> list[dict[str, Any]]:
    """Return chosen episodes as recorded trajectories, with their step. Raises `ConfigError`, `BadPayload`."""
    from penstock.trainer import load_tokenizer, readable_trajectory

    tokenizer = load_tokenizer(load_run(folder_of_run(run, runs_dir)).model)
    return [
        {"step": step, "learned": learned, **readable_trajectory(trajectory, None, tokenizer)}
        for step, learned, trajectory in trajectories(opened(run, runs_dir), where)
    ]


def trajectories(archive: Archive, where: Sequence[str]) -> Iterator[tuple[int, int, Trajectory]]:
    """Yield (step, learned, trajectory) of chosen episodes, by step. Raises `ConfigError`, `BadPayload`."""
    rows = chosen(listed(archive), where).select(["step", "learned", "episode"]).to_pylist()
    for step, learned in sorted({(row["step"], row["learned"]) for row in rows}):
        names = [row["episode"] for row in rows if row["step"] == step]
        for trajectory in archive.read(step, names).values():
            yield step, learned, trajectory
