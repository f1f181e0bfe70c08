"""Frames per second of LeRobot's own loader and of ours, on the same files with the same order.

    python benchmarks/loading_lerobot.py [--workers 0 2 4] [--rounds 3] [--size 240 320]

It needs an environment with `lerobot[dataset]` (Python 3.12) beside parallel-train. A small dataset
is written into a temporary folder: once with a video (AV1, a key frame every 2 frames, as LeRobot
records) and once with pictures inside of the parquet files. A sample is 8 frames, samples come in
the shuffled order of training, and both sides run in turn in every round. The pixels of both are
compared first. The program prints medians, the ratio, and how often each side opened a video by
PyAV while it read; LeRobot uses torchcodec where FFmpeg is installed.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset as TheirDataset
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler
from parallel_train.data.writing import Episode, write_dataset

CAMERA = "observation.images.top"
FPS, FRAMES, EPISODES, BATCH, BATCHES = 10, 8, 6, 8, 24
DATA = "data/chunk-000/file-000.parquet"


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, nargs=2, default=[240, 320])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for kind, root in _datasets(Path(name), *options.size).items():
            _compare(kind, root, options.workers, options.rounds)


def _compare(kind: str, root: Path, workers: list[int], rounds: int) -> None:
    times = [(step - FRAMES + 1) / FPS for step in range(FRAMES)]
    ours = LeRobotDataset(root, {CAMERA: times}, cameras=[CAMERA])
    theirs = TheirDataset("local/data", root=root, delta_timestamps={CAMERA: times})
    order = GlobalBatchSampler(len(ours), BATCH, seed=3)
    for sample in next(iter(order)):
        found = (theirs[sample][CAMERA] * 255).round().to(torch.uint8)
        assert torch.equal(found, ours[sample][CAMERA]), f"pixels of sample {sample} differ"
    opens = {}
    for side, dataset in (("lerobot", theirs), ("ours", ours)):
        with _CountedOpens() as counted:
            _frames_per_s(_loader(side, dataset, order, 0))
        opens[side] = counted.number
    print(f"{kind}: pixels are equal; calls of av.open in {BATCHES} batches: {opens}")
    for number in workers:
        rates: dict[str, list[float]] = {"lerobot": [], "ours": []}
        for _, (side, dataset) in itertools.product(
            range(rounds), (("lerobot", theirs), ("ours", ours))
        ):
            rates[side].append(_frames_per_s(_loader(side, dataset, order, number)))
        their, our = (statistics.median(rates[side]) for side in ("lerobot", "ours"))
        print(
            f"  {number} workers: lerobot {their:7.0f} frames/s, ours {our:7.0f}, "
            f"ratio {our / their:.2f}"
        )


def _loader(side: str, dataset: Dataset[Any], order: GlobalBatchSampler, workers: int) -> Any:
    if side == "ours":
        return build_loader(dataset, order, num_workers=workers)
    return DataLoader(dataset, batch_sampler=order, num_workers=workers)


def _frames_per_s(loader: Iterable[Any]) -> float:
    """After one batch, in which workers and decoders start."""
    batches = iter(loader)
    next(batches)
    started = time.perf_counter()
    for batch in itertools.islice(batches, BATCHES):
        assert batch[CAMERA].shape[:2] == (BATCH, FRAMES)
    return BATCHES * BATCH * FRAMES / (time.perf_counter() - started)


class _CountedOpens:
    """Counts how often PyAV opens a file in this process."""

    def __enter__(self) -> _CountedOpens:
        self.number, self._open = 0, av.open
        av.open = self._counted
        return self

    def __exit__(self, *error: object) -> None:
        av.open = self._open

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        return self._open(*args, **kwargs)


def _datasets(folder: Path, height: int, width: int) -> dict[str, Path]:
    """The same demonstrations with a video, and with PNG files in the parquet file."""
    generator = np.random.default_rng(0)
    episodes = []
    for _ in range(EPISODES):
        state = generator.normal(size=(120, 7)).astype(np.float32)
        shown = np.empty((120, height, width, 3), np.uint8)
        shown[:] = (
            generator.integers(40, 215, (8, 8, 3), np.uint8)
            .repeat(height // 8, 0)
            .repeat(width // 8, 1)
        )
        for number, picture in enumerate(shown):
            picture[20:60, number : number + 40] = (250, 2 * number, 10)
        episodes.append(Episode(state, state, "push", {CAMERA: shown}))
    video, pictures = folder / "video", folder / "pictures"
    write_dataset(video, episodes, fps=FPS, codec="libsvtav1")
    shutil.copytree(video, pictures)
    shutil.rmtree(pictures / "videos")
    info = json.loads((pictures / "meta/info.json").read_text())
    info["features"][CAMERA]["dtype"] = "image"
    (pictures / "meta/info.json").write_text(json.dumps(info))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    files = [
        {"bytes": _png(picture), "path": None}
        for episode in episodes
        for picture in episode.images[CAMERA]
    ]
    table = pq.read_table(pictures / DATA).append_column(CAMERA, pa.array(files, kind))
    pq.write_table(table, pictures / DATA, row_group_size=120)
    return {"video": video, "pictures": pictures}


def _png(picture: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    main()
