"""`penstock recipes`: what ships."""

from __future__ import annotations

import typer


def recipes() -> None:
    """List the recipes that ship: name, what is learned, what it needs; and the templates of `penstock init`.

    Their files are in the folder of the first line; `penstock init` makes a project of your own of one of them.
    """
    from penstock.deploy.shipped import FOLDER, shipped_recipes, templates

    found = shipped_recipes()
    width, wide = max(len(one.file) for one in found), max(len(one.needs) for one in found)
    typer.echo(f"{FOLDER.resolve()}:")
    for one in found:
        typer.echo(f"  {one.file:{width}}  {one.needs:{wide}}  {one.about}")
    typer.echo("\ntemplates, for `penstock init FOLDER --from NAME`:")
    for template in templates().values():
        typer.echo(f"  {template.name:{width}}  {'CPU':{wide}}  {template.about}")
