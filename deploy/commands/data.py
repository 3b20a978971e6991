"""`penstock data`: turn raw data into Parquet files with verl's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.commands import data_harbor, data_swe
from penstock.deploy.commands.shared import user_errors

app = typer.Typer(help="Turn raw data into Parquet files with verl's columns.", no_args_is_help=True)

app.command("check")(data_harbor.check)
app.command("export")(data_harbor.export)
app.command("swe-mutations")(data_swe.swe_mutations)
app.command("swe-check")(data_swe.swe_check)
app.command("swe-bench")(data_swe.swe_bench)
app.command("swe-gym")(data_swe.swe_gym)
app.command("r2e")(data_swe.r2e)

Out = Annotated[Path, typer.Option("--out", help="Folder for train.parquet and the other splits.")]


@app.command()
def calculator(
    out: Out,
    train: Annotated[int, typer.Option(help="Training problems.")] = 4096,
    evaluation: Annotated[int, typer.Option("--eval", help="Evaluation problems, none of them in training.")] = 128,
    seed: int = 0,
) -> None:
    """Generated arithmetic: what the quickstart trains on."""
    from penstock.datasets import write_calculator

    for split, count in write_calculator(out, train, evaluation, seed).items():
        typer.echo(f"{out / f'{split}.parquet'}: {count} problems")


@app.command()
def gsm8k_equations(
    source: Annotated[Path, typer.Option("--input", help="Folder with GSM8K's train.jsonl and test.jsonl.")],
    out: Out = Path("data/gsm8k-equations"),
    everything: Annotated[
        bool, typer.Option("--all", help="Keep problems outside the base model's range too.")
    ] = False,
    keep_duplicates: Annotated[bool, typer.Option(help="Keep expressions that occur more than once.")] = False,
) -> None:
    """One task per calculator annotation of GSM8K (<<48/2=24>>), train and test split."""
    from penstock.datasets import BadInput, write_gsm8k_equations

    with user_errors(BadInput):
        counts = write_gsm8k_equations(source, out, all_rows=everything, keep_duplicates=keep_duplicates)
    for name, count in counts.items():
        typer.echo(f"{name}: {count}")
