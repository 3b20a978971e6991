"""Shell scripts of verl are read as bash reads them, and what only a run of the script would know is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.migrate.convert import migrate
from penstock.deploy.migrate.source import BadSource, read_source

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
    words = "from branches of run.sh that may not run when you start it: "
    assert [note.partition(" (")[0] for note in source.notes] == [words + one for one in uncertain]
    assert all("append each that differs" in note for note in source.notes)
    assert all(f"# {note}" in migrate(source).yaml() for note in source.notes)


GPUS = "trainer.n_gpus_per_node"


@pytest.mark.parametrize(
    ("script", "values", "notes"),
    [
        ("D=${D:-$(detect)}\ncase $D in\n gpu)\n  G=8\n ;;\n npu)\n  G=16\n ;;\nesac", {GPUS: 8}, ["the one of gpu"]),
        ("case ${D:-npu} in gpu) G=8 ;; npu) G=16 ;; *) exit 1 ;; esac", {GPUS: 16}, []),
        ('D=cuda\ncase "$D" in\n "rocm"|"cuda") G=4;;\n *) G=2;;\nesac', {GPUS: 4}, []),
        (
            "case $D in\na)\ncase $E in gpu) G=1;; esac ;;\nb) G=2 ;;\nesac",
            {GPUS: 2},
            ["the one of gpu", "may not run"],
        ),
        ("case $D in\ngpu) G=8 ;;\nnpu)\nif $V; then G=1\nelse G=2\n;;\nesac", {GPUS: 8}, ["the one of gpu"]),
        ("if $D; then\ncase gpu in gpu) G=8;; esac\nfi", {GPUS: 8}, ["may not run"]),
        ("case $D in a) G=1;; b) G=2;; esac", {GPUS: 2}, ["may not run"]),
    ],
)
def test_the_branch_of_a_case_is_that_of_bash_or_of_gpus(
    tmp_path: Path, script: str, values: dict[str, Any], notes: list[str]
) -> None:
    (tmp_path / "run.sh").write_text(f"{script}\n{LAUNCH} {GPUS}=$G\n")
    source = read_source(tmp_path / "run.sh", ())
    assert source.values == values
    assert [word in note for word, note in zip(notes, source.notes, strict=True)] == [True] * len(notes)


# the YAML file that a script names ------------------------------------------------------------------------------------
CONFIG = """
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_megatron_trainer, other, _self_]
data: {max_response_length: 77, max_prompt_length: 99}
actor_rollout_ref: {rollout: {multi_turn: {enable: true}}}
"""
MULTI = "actor_rollout_ref.rollout.multi_turn.enable"


@pytest.mark.parametrize(
    "options",
    [
        '--config-path="$HERE/config" --config-name=mine',
        '--config-path "$(pwd)/examples/config" --config-name mine.yaml',
        "-cp=examples/config -cn=mine",
    ],
)
@pytest.mark.parametrize("start", [".", "elsewhere"])
def test_the_yaml_that_a_script_names_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, start: str
) -> None:
    for folder in ("examples/config", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / start)
    script = tmp_path / "examples/run.sh"
    script.write_text(f'HERE=$(dirname "$0")\nO=({options})\n{LAUNCH} "${{O[@]}}" data.max_prompt_length=5\n')
    (tmp_path / "examples/config/mine.yaml").write_text(CONFIG)
    (tmp_path / "examples/config/other.yaml").write_text(f"{N.replace('.', ': {')}: 3" + "}" * N.count("."))
    values = read_source(script, ()).values
    assert (values["data.max_response_length"], values[MULTI], values["model_engine"]) == (77, True, "megatron")
    assert values[N] == 3
    assert values["data.max_prompt_length"] == 5, "the script's own words go before the file"


def test_a_yaml_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{LAUNCH} --config-path=/no/folder --config-name=mine {N}=8\n")
    (lost,) = migrate(read_source(tmp_path / "run.sh", ())).account.unmapped
    assert (lost.key, lost.value, "give the YAML as FILE" in lost.why) == (
        "--config-name",
        "/no/folder/mine.yaml",
        True,
    )


def test_a_yaml_of_verls_own_is_known(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{LAUNCH} --config-name=ppo_megatron_trainer.yaml {N}=8\n")
    assert read_source(tmp_path / "run.sh", ()).values == {"model_engine": "megatron", N: 8}


def test_a_script_with_two_launches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two.sh").write_text(f"{LAUNCH} {N}=8\n{LAUNCH} {N}=4\n")
    with pytest.raises(BadSource, match=r"two\.sh: it starts 2 runs"):
        read_source(tmp_path / "two.sh", ())


@pytest.mark.parametrize("where", ["./args.sh", '$(dirname "$0")/args.sh'])
def test_a_sourced_file_is_read_in_its_place(tmp_path: Path, where: str) -> None:
    (tmp_path / "args.sh").write_text(f"source args.sh\nn=8\nA=({LR}=3e-6)\n")
    (tmp_path / "run.sh").write_text(f'n=2\nsource "{where}"\n{LAUNCH} {N}=$n "${{A[@]}}"\n')
    assert read_source(tmp_path / "run.sh", ()).values == {N: 8, LR: 3e-6}


def test_arguments_that_nothing_sets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f'source args.sh\n{LAUNCH} {N}=8 "${{A[@]}}"\n')
    with pytest.raises(BadSource, match=r"nothing sets \$\{A\[@\]\}.*source args\.sh: no such file"):
        read_source(tmp_path / "run.sh", ())


@pytest.mark.parametrize(
    ("program", "staleness", "unmapped"),
    [
        ("verl.trainer.main_ppo", 0, []),
        ("recipe.dapo.main_dapo", 0, []),
        ("recipe.one_step_off_policy.main_ppo", 1, []),
        ("recipe.sppo.main_sppo", 0, ["--program"]),
        ("recipe/prime/main_prime.py", 0, ["--program"]),
    ],
)
def test_the_program_of_a_script_counts(tmp_path: Path, program: str, staleness: int, unmapped: list[str]) -> None:
    (tmp_path / "run.sh").write_text(f"python3 -m {program} {N}=8 trainer.total_training_steps=1\n")
    migrated = migrate(read_source(tmp_path / "run.sh", ()))
    assert migrated.recipe["max_staleness"] == staleness
    assert [one.key for one in migrated.account.unmapped] == unmapped


def test_fine_tuning_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun -m verl.trainer.fsdp_sft_trainer {N}=8\n")
    with pytest.raises(BadSource, match="penstock sft"):
        read_source(tmp_path / "run.sh", ())
