"""docs/reference/configuration.md, generated from the configuration tree."""

from __future__ import annotations

from itertools import groupby

from penstock.deploy.config import RunConfig
from penstock.deploy.config_schema import list_settings

HEADER = """# Configuration

A recipe is a YAML file of this tree, or a Python file with `SETTINGS`;
`section.key=value` on the command line overrides it;
`penstock run RECIPE --dry-run` prints the resolved tree and what its knobs mean together,
and fails where a start would be refused.
Unknown keys are errors that name the nearest valid one.
"""


def render_configuration() -> str:
    lines = [HEADER]
    for section, settings in groupby(list_settings(RunConfig), lambda setting: setting.key.rpartition(".")[0]):
        lines += [f"## {section or 'top level'}\n", "| key | default | what it does |\n| --- | --- | --- |"]
        for one in settings:
            default = "*needed*" if one.default is None else f"`{one.default}`".replace("|", "\\|")
            lines.append(f"| `{one.key}` | {default} | {one.description} |")
        lines.append("")
    return "\n".join([*lines, ""])
