"""Shell scripts of verl are read as bash reads them, and what only a run of the script would know is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.migrate.convert import migrate
from penstock.deploy.migrate.source import BadSource, read_source
from penstock.deploy.migrate.table import load_table

N, LR = "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.optim.lr"
LAUNCH = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{LAUNCH} trainer.experiment_name=run#3 \\\n  {N}=8 # don't", {"trainer.experiment_name": "run#3", N: 8}),
        (f"M=a/b\n{LAUNCH} trainer.project_name=${{M##*/}} {N}=8", {"trainer.project_name": "${M##*/}", N: 8}),
        (f'A=({N}=1 {LR}=9)\nB=({N}=8\n  {LR}=3e-6)\n{LAUNCH} "${{B[@]}}"', {N: 8, LR: 3e-6}),
        (f"A=({N}=8)\nA+=({LR}=3e-6)\n{LAUNCH} ${{A[@]}}", {N: 8, LR: 3e-6}),
        (f'OPT="\n  {N}=8\n"\nOPT+=" {LR}=3e-6"; {LAUNCH} $OPT', {N: 8, LR: 3e-6}),
        (f'export PATH=/x:$PATH\nA=("${{A[@]}}" {N}=8)\necho $PATH; {LAUNCH} ${{A[@]}}', {N: 8}),
        (f'SAY="don\'t"\necho $SAY\n{LAUNCH} {N}=8', {N: 8}),
        (f'F=(a.parquet b.parquet)\n{LAUNCH} data.val_files="${{F[1]}}"', {"data.val_files": "b.parquet"}),
        (f"{LAUNCH} {N}=$((${{TRAIN_BS:-128}} / 2))", {N: 64}),
        (f"{LAUNCH} data.val_files=$(pwd)/a.parquet", {"data.val_files": f"{Path.cwd()}/a.parquet"}),
        (f"{LAUNCH} trainer.experiment_name=$(date +%F)", {"trainer.experiment_name": "$(date +%F)"}),
    ],
)
def test_words_of_a_script_are_those_of_bash(tmp_path: Path, script: str, expected: dict[str, Any]) -> None:
    (tmp_path / "run.sh").write_text(script)
    assert read_source(tmp_path / "run.sh", ()).values == expected


@pytest.mark.parametrize(
    "folder",
    [
        '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        '$(cd -- "$(dirname -- "$0")" >/dev/null 2>&1 && pwd -P)',
        '$(dirname "$0")',
        "`dirname $0`",
    ],
)
def test_a_scripts_own_folder_is_known(tmp_path: Path, folder: str) -> None:
    (tmp_path / "run.sh").write_text(f'HERE="{folder}"\n{LAUNCH} custom_reward_function.path="$HERE/r.py"\n')
    assert read_source(tmp_path / "run.sh", ()).values == {"custom_reward_function.path": str(tmp_path / "r.py")}


@pytest.mark.parametrize(
    ("script", "values", "uncertain"),
    [
        (f"if $BIG; then\n  n=8\nelse n=4\nfi\nrate=1\n{LAUNCH} {N}=$n {LR}=$rate", {N: 4, LR: 1}, [f"{N}=4"]),
        (f'if [ -n "$D" ]; then A+=({N}=2); fi\n{LAUNCH} {LR}=1 "${{A[@]}}"', {LR: 1, N: 2}, [f"{N}=2"]),
        (f"[ $C = 1 ] && n=8 || n=4\n{LAUNCH} {N}=$n {LR}=1", {N: 4, LR: 1}, [f"{N}=4"]),
        (f"[[ $C == 1 ]] && A+=({N}=2)\n{LAUNCH} ${{A[@]}} {LR}=1", {N: 2, LR: 1}, [f"{N}=2"]),
        (f"cd x && {LAUNCH} {N}=8 || exit 1", {N: 8}, []),
        (f"for n in {N}=1 {N}=2; do echo $n; done\n{LAUNCH} {N}=8", {N: 8}, []),
    ],
)
def test_settings_of_branches_are_named(tmp_path: Path, script: str, values: dict[str, Any], uncertain: str) -> None:
    (tmp_path / "run.sh").write_text(script)
    source = read_source(tmp_path / "run.sh", ())
    assert source.values == values
    words = "from branches of run.sh that may not run when you start it, so check them: "
    assert list(source.notes) == [words + one for one in uncertain]
    assert all(f"# {note}" in migrate(source, load_table("verl")).yaml() for note in source.notes)


def test_a_script_with_two_launches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two.sh").write_text(f"{LAUNCH} {N}=8\n{LAUNCH} {N}=4\n")
    with pytest.raises(BadSource, match=r"two\.sh: it starts 2 runs"):
        read_source(tmp_path / "two.sh", ())
