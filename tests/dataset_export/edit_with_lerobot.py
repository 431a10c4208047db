"""Edits a dataset with lerobot's own tools: python edit_with_lerobot.py DATASET OUT

Makes OUT/deleted (without episodes 1 and 3), OUT/split/early and OUT/split/late, and OUT/merged of those two.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lerobot.datasets.dataset_tools import delete_episodes, merge_datasets, split_dataset
from lerobot.datasets.lerobot_dataset import LeRobotDataset


def main() -> None:
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    dataset = LeRobotDataset("local/whole", root=root, video_backend="pyav")
    delete_episodes(dataset, [1, 3], output_dir=out / "deleted", repo_id="local/deleted")
    middle = dataset.num_episodes // 2
    parts: dict[str, float | list[int]] = {
        "early": list(range(middle)),
        "late": list(range(middle, dataset.num_episodes)),
    }
    split = split_dataset(dataset, parts, output_dir=out / "split")
    merge_datasets(list(split.values()), output_repo_id="local/merged", output_dir=out / "merged")


if __name__ == "__main__":
    main()
