"""Edits a dataset with lerobot's own tools: python -m dayshift.dataset_export.edit_with_lerobot DATASET OUT

Makes OUT/deleted (without episode 1), OUT/split/early and OUT/split/late, and OUT/merged of those two:
what tests and demonstration then verify. Run in a fresh process, see `fresh_process.run_lerobot`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lerobot.datasets.dataset_tools import delete_episodes, merge_datasets, split_dataset
from lerobot.datasets.lerobot_dataset import LeRobotDataset


def main() -> None:
    """Edit the dataset that the command line names."""
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    dataset = LeRobotDataset("local/whole", root=root, video_backend="pyav")
    delete_episodes(dataset, [1], output_dir=out / "deleted", repo_id="local/deleted")
    middle = dataset.num_episodes // 2
    parts: dict[str, float | list[int]] = {
        "early": list(range(middle)),
        "late": list(range(middle, dataset.num_episodes)),
    }
    split = split_dataset(dataset, parts, output_dir=out / "split")
    merge_datasets(list(split.values()), output_repo_id="local/merged", output_dir=out / "merged")


if __name__ == "__main__":
    main()
