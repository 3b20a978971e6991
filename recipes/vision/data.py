"""Generated pictures as a dataset with the column `images`, as verl and EasyR1 have it; and a page to look at.

    python -m penstock.recipes.vision.data --out data/vision

Writes train.parquet and eval.parquet, each row with `<image>` in its prompt and a PNG next to it. For screen.yaml it
writes screen.parquet and, in runs/demo, what `penstock dashboard` shows of a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from penstock.datasets import Row, write_parquet
from penstock.recipes.vision.pictures import QUESTIONS, Picture, picture
from penstock.recipes.vision.screen import VIEWS, address_of

RUN = "demo"
STEPS = 20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--train", type=int, default=1024, help="pictures to train on")
    parser.add_argument("--eval", type=int, default=128, help="pictures to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for split, count in {"train": options.train, "eval": options.eval}.items():
        dice = Random(f"{split}/{options.seed}")
        write_parquet([row(picture(dice), split, index) for index in range(count)], options.out / f"{split}.parquet")
    write_parquet([screen_row(view, index) for index, view in enumerate(VIEWS)], options.out / "screen.parquet")
    write_run(options.out / "runs" / RUN)
    print(f"{options.out}: {options.train} and {options.eval} pictures, {len(VIEWS)} views of a page")


def row(drawn: Picture, split: str, index: int) -> Row:
    return {
        "data_source": f"pictures/{drawn.kind}",
        "prompt": [{"role": "user", "content": f"<image>{QUESTIONS[drawn.kind]}"}],
        "images": [{"bytes": drawn.png, "path": f"{split}-{index}.png"}],
        "reward_model": {"style": "rule", "ground_truth": drawn.answer},
        "extra_info": {"split": split, "index": index},
    }


def screen_row(view: str, index: int) -> Row:
    """A view of the page that has to be opened. The tool takes the first screenshot: rows have no `images`."""
    return {
        "data_source": "screen",
        "prompt": [{"role": "user", "content": f"A browser shows a dashboard. Open its view {view!r}."}],
        "reward_model": {"style": "rule", "ground_truth": address_of(RUN, view)},
        "extra_info": {"index": index, "view": view},
    }


def write_run(folder: Path) -> None:
    """A run's recipe and the metrics of its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"trainer: {{steps: {STEPS}, ranks: 1}}\nrollout: {{servers: 1}}\n")
    steps = [{"step": step, "reward": 1 - 0.7 * 0.85**step, "wall_s": 2.0, "wait_s": 0.5} for step in range(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


if __name__ == "__main__":
    main()
