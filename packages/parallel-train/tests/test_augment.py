"""Pictures are changed at random by (seed, place in the stream), while training alone."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel_config import ConfigError
from parallel_testing.programs import run_ptrain
from parallel_train.cli.parsing import parse
from parallel_train.data.augment import Augmented, ImageTransforms
from parallel_train.data.config import ImageTransformsConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler, Samples, key_of, uniform
from parallel_train.data.writing import Episode, write_dataset

pytest.importorskip("torchvision")
pytest.importorskip("av")
# Python 3.12 warns about the fork that starts a loader worker.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

TOP, SIDE = "observation.images.top", "observation.images.side"
ON = ImageTransformsConfig(enable=True)
ALONE = dict.fromkeys(("brightness", "contrast", "saturation", "hue", "sharpness"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cameras, two episodes of 10 frames, each frame of a colour of its own."""
    generator = np.random.default_rng(0)

    def episode() -> Episode:
        state = generator.normal(size=(10, 3)).astype(np.float32)
        colours = generator.integers(40, 215, (2, 10, 1, 1, 3), np.uint8)
        pictures = np.tile(colours, (1, 1, 32, 48, 1))
        pictures[:, :, 8:20, 10:30] //= 2
        return Episode(state, state[:, :2], "look", dict(zip((TOP, SIDE), pictures, strict=True)))

    folder = tmp_path_factory.mktemp("data") / "set"
    write_dataset(folder, [episode(), episode()], fps=10)
    return folder


@pytest.fixture(scope="module")
def dataset(root: Path) -> LeRobotDataset:
    return LeRobotDataset(root, {SIDE: [-0.1, 0.0]}, cameras=[TOP, SIDE])


def stream(
    dataset: LeRobotDataset, ranks: int = 1, workers: int = 0, start: int = 0, seed: int = 5
) -> dict[str, Tensor]:
    """The pictures of samples `start` to 40, in the order of the stream."""
    found: dict[str, list[Tensor]] = {TOP: [], SIDE: []}
    micro = 4 // ranks
    loaders = [
        iter(
            build_loader(
                Augmented(dataset, ON, seed),
                GlobalBatchSampler(
                    len(dataset), micro, 1, rank, ranks, seed=seed, start_samples=start
                ),
                num_workers=workers,
            )
        )
        for rank in range(ranks)
    ]
    for _ in range((40 - start) // 4):
        for loader in loaders:
            batch = next(loader)
            for camera in found:
                found[camera] += batch[camera]
    return {camera: torch.stack(pictures) for camera, pictures in found.items()}


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (4, 1)])
def test_ranks_and_workers_see_the_pictures_of_one_process(
    dataset: LeRobotDataset, ranks: int, workers: int
) -> None:
    one, several = stream(dataset), stream(dataset, ranks, workers)
    assert torch.equal(one[TOP], several[TOP])
    assert torch.equal(one[SIDE], several[SIDE])


def test_a_resumed_stream_goes_on_with_the_same_pictures(dataset: LeRobotDataset) -> None:
    whole, rest = stream(dataset), stream(dataset, ranks=2, start=24)
    assert torch.equal(whole[TOP][24:], rest[TOP])


def test_a_sample_is_changed_otherwise_in_each_epoch_by_each_camera_and_by_each_seed(
    dataset: LeRobotDataset,
) -> None:
    augmented = Augmented(dataset, ON, 5)
    first = augmented.__getitems__(Samples([3], 0))
    again = augmented.__getitems__(Samples([3], 0))
    assert torch.equal(first[TOP], again[TOP])
    others = [
        augmented.__getitems__(Samples([3], 20)),
        Augmented(dataset, ON, 6).__getitems__(Samples([3], 0)),
    ]
    for other in others:
        assert not torch.equal(first[TOP], other[TOP])
        assert torch.equal(first["observation.state"], other["observation.state"])
    plain = dataset.__getitems__([3])
    changes = [(first[c].double() - plain[c]).mean().item() for c in (TOP, SIDE)]
    assert abs(changes[0] - changes[1]) > 1e-3


def test_the_frames_of_a_window_are_changed_alike(dataset: LeRobotDataset) -> None:
    same = torch.full((2, 3, 32, 48), 90, dtype=torch.uint8)
    changed = ImageTransforms(ON)(same, key_of(1, 2, 3))
    assert changed.dtype == torch.uint8
    assert changed.shape == same.shape
    assert torch.equal(changed[0], changed[1])


def test_the_subset_follows_number_and_weights() -> None:
    def dark(config: ImageTransformsConfig) -> float:
        """The part of 2000 draws in which brightness, which alone makes it so dark, is chosen."""
        grey = torch.full((3, 8, 8), 200, dtype=torch.uint8)
        transforms = ImageTransforms(config)
        values = [transforms(grey, key_of(n)).double().mean().item() for n in range(2000)]
        return sum(value < 100 for value in values) / 2000

    def chosen(number: int, weight: float) -> ImageTransformsConfig:
        return ImageTransformsConfig(
            enable=True, max_num_transforms=number, brightness=(0.2, 0.4), affine=None,
            weights={"brightness": weight},
        )  # fmt: skip

    assert dark(chosen(1, 4)) == pytest.approx(4 / 8, abs=0.04)
    assert dark(chosen(2, 1)) == pytest.approx(2 / 5, abs=0.04)
    assert dark(chosen(4, 0)) == 0


def test_amounts_fill_their_range_and_stay_in_it() -> None:
    config = ImageTransformsConfig(
        enable=True, max_num_transforms=1, **{**ALONE, "brightness": (0.5, 0.9)}, affine=None
    )
    grey = torch.full((3, 4, 4), 200, dtype=torch.uint8)
    transforms = ImageTransforms(config)
    values = [transforms(grey, key_of(n)).double().mean().item() / 200 for n in range(400)]
    assert 0.495 <= min(values) < 0.51
    assert 0.89 < max(values) <= 0.9
    moved = ImageTransformsConfig(
        enable=True, max_num_transforms=1, **ALONE, affine=(0.0, 0.0), translate=(0.25, 0.0)
    )
    dot = torch.zeros((3, 16, 16), dtype=torch.uint8)
    dot[:, 8, 8] = 255
    transforms = ImageTransforms(moved)
    places = [transforms(dot, key_of(n))[0].nonzero().tolist()[0] for n in range(200)]
    assert {row for row, _ in places} == {8}
    assert {column for _, column in places} == set(range(4, 13))


def test_uniform_numbers_are_pinned() -> None:
    """A resumed run must draw what it drew before an update of this package or of numpy."""
    assert uniform(key_of(3, 14), 3).tolist() == PINNED
    many = uniform(key_of(1), 100_000)
    assert abs(many.mean() - 0.5) < 0.005
    assert many.min() >= 0
    assert many.max() < 1


PINNED = [0.948006747308074, 0.7167430211581896, 0.8209450153402615]


def test_samples_keep_their_place_on_the_way_to_a_worker() -> None:
    samples = next(islice(GlobalBatchSampler(10, 4, 1, 1, 2, start_samples=16), 1, None))
    assert samples.first == 16 + 8 + 4
    copy = pickle.loads(pickle.dumps(samples))
    assert (copy, copy.first) == (samples, samples.first)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"brightness": (1.2, 0.8)}, "brightness = 1.2 0.8, but it must be two numbers from 0 to"),
        ({"contrast": (-1.0, 1.0)}, "contrast = -1 1, but"),
        ({"hue": (0.0, 0.7)}, "hue = 0 0.7, but it must be two numbers from -0.5 to 0.5"),
        ({"sharpness": (float("nan"), 1.0)}, "sharpness = nan 1, but"),
        ({"translate": (0.0, 1.5)}, "translate = 0 1.5, but it must be two numbers from 0 to 1"),
        ({"weights": {"blur": 1.0}}, "weights names 'blur', but the transforms are brightness, "),
        ({"weights": {"hue": -1.0}}, "weights hue = -1.0, but it must be at least 0"),
        ({"max_num_transforms": 7}, "max_num_transforms = 7, but 6 transform(s) are in use"),
        ({"max_num_transforms": 0}, "max_num_transforms = 0, but 6 transform(s) are in use"),
        ({**ALONE, "affine": None}, "max_num_transforms = 3, but 0 transform(s) are in use"),
    ],
)
def test_wrong_settings_are_refused_by_name(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"--dataset\.image_transforms") as caught:
        ImageTransformsConfig(enable=True, **changed)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hue=0.5", "affine=0"], {"hue": 0.5, "affine": 0.0}),
        (['{"hue": 2}'], {"hue": 2.0}),
        ([], {}),
    ],
)
def test_weights_are_pairs_or_one_mapping(words: list[str], expected: dict[str, float]) -> None:
    parsed = parse(["train", "--dataset.image_transforms.weights", *words])
    assert parsed.command.run.dataset.image_transforms.weights == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [(["hue"], "'hue' is not a pair NAME=NUMBER"), (["hue=x"], "'hue' is given 'x', but it must")],
)
def test_wrong_weights_are_told(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["train", "--dataset.image_transforms.weights", *words])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said


def test_trained_from_the_command_line_the_losses_do_not_depend_on_ranks(
    root: Path, tmp_path: Path
) -> None:
    flags = [
        "--dataset.root", root, "--policy.cameras", TOP, SIDE, "--policy.dim_model", 32,
        "--policy.dim_feedforward", 16, "--policy.chunk_size", 4, "--policy.n_encoder_layers", 1,
        "--policy.dropout", 0, "--policy.no_use_vae", "--policy.vision_weights", "None",
        "--steps", 3, "--eval.fraction", 0.5, "--eval.freq", 3,
    ]  # fmt: skip
    enable = "--dataset.image_transforms.enable"

    def train(name: str, *more: object) -> list[dict[str, float]]:
        said = run_ptrain("train", *flags, "--output_dir", name, *more, cwd=tmp_path)
        assert ("changed at random by 3 of brightness" in said) == (enable in more)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    plain = train("plain", "--batch_size", 4)
    one = train("one", "--batch_size", 4, enable)
    two = train("two", "--batch_size", 2, enable, "--nproc_per_node", 2)
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], rel=1e-4)
    assert [row["loss"] for row in one] != pytest.approx([row["loss"] for row in plain], rel=1e-4)
    said = run_ptrain("train", "--steps", 1, "--output_dir", "none", enable, cwd=tmp_path, code=2)
    assert "enable = True, but the policy does not read a camera. Use --policy.cameras" in said
