"""The world-action model with cameras and texts; no video is decoded here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_config import ConfigError
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.processors import Preprocessor
from parallel_train.policies.wam.configuration import WAMConfig
from parallel_train.policies.wam.modeling import WAMPolicy
from parallel_train.policies.wam.tokens import NO_BYTE, PatchGrid, text_bytes

TOP, SIDE = "observation.images.top", "observation.images.side"
SPEC = DataSpec(
    10,
    {
        "observation.state": Feature("float32", (5,)),
        TOP: Feature("video", (16, 16, 3)),
        SIDE: Feature("video", (12, 20, 3)),
        "action": Feature("float32", (3,)),
    },
    ("open the box", "close"),
)


def policy(**changes: Any) -> WAMPolicy:
    """What begins at zero gets random weights, so that it shows."""
    sizes: dict[str, Any] = {
        "n_layers": 2,
        "n_heads": 2,
        "head_dim": 8,
        "width": 24,
        "action_width": 16,
        "image_size": 16,
        "patch_size": 8,
        "chunk_size": 6,
        "world_frames": 2,
        "world_stride": 3,
        "num_flow_steps": 2,
        "cameras": (TOP, SIDE),
    }
    torch.manual_seed(0)
    model = WAMPolicy(WAMConfig(**{**sizes, **changes}), SPEC)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch(count: int = 3, frames: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    pad = torch.arange(frames) > torch.arange(count)[:, None]
    return {
        "observation.state": torch.randn(count, frames, 5, generator=generator),
        "observation.state_is_pad": pad,
        TOP: torch.randn(count, frames, 3, 16, 16, generator=generator),
        SIDE: torch.randn(count, frames, 3, 12, 20, generator=generator),
        "task_index": torch.arange(count) % 2,
        "action": torch.randn(count, 6, 3, generator=generator),
        "action_is_pad": torch.zeros(count, 6, dtype=torch.bool),
    }


def observation(inputs: dict[str, Any]) -> dict[str, Any]:
    """What a robot would send: the present frame, without a time dim."""
    names = ("observation.state", TOP, SIDE)
    return {"task_index": inputs["task_index"], **{name: inputs[name][:, 0] for name in names}}


def with_noise(model: WAMPolicy, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    answer: tuple[Tensor, dict[str, Tensor]] = model(inputs)
    return answer


def chunk(model: WAMPolicy, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(5)
    return model.predict_action_chunk(inputs)


def test_patches_come_row_by_row_and_go_back() -> None:
    grid = PatchGrid(16, 4)
    images = torch.randn(2, 5, 3, 16, 16)
    patches = grid.cut(images)
    assert patches.shape == (2, 5, grid.num_patches, grid.numbers) == (2, 5, 16, 48)
    second_row_third = images[1, 2, :, 4:8, 8:12]
    assert torch.equal(patches[1, 2, 4 + 2].reshape(3, 4, 4), second_row_third)
    assert torch.equal(grid.join(patches), images)
    constant = torch.ones(1, 3, 30, 18) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    assert torch.equal(grid.join(grid.cut(constant)), constant[..., :16, :16])


def test_texts_are_their_bytes() -> None:
    found = text_bytes(["aé", "", "abcdef"], 4)
    assert found.tolist() == [
        [97, 0xC3, 0xA9, NO_BYTE],
        [NO_BYTE] * 4,
        [97, 98, 99, 100],
    ]
    assert text_bytes([""], 4).shape == (1, 1)


def test_the_loss_is_that_of_vectors_pictures_and_actions() -> None:
    model, inputs = policy(world_weight=0.5, camera_weight=0.25), batch()
    loss, metrics = with_noise(model, inputs)
    assert set(metrics) == {"action_loss", "world_loss", "pictures_loss"}
    expected = metrics["action_loss"] + 0.5 * metrics["world_loss"]
    torch.testing.assert_close(loss.detach(), expected + 0.25 * metrics["pictures_loss"])
    torch.manual_seed(5)
    time = torch.rand(3)
    data = model._future(inputs)
    assert data["pictures"].shape == (3, 2 * 2 * 4, 192)
    # Frame by frame, in it camera by camera: the last four tokens are the side camera's last frame.
    last = model.grid.join(data["pictures"][:, -4:])
    torch.testing.assert_close(last, model.grid.join(model.grid.cut(inputs[SIDE][:, 2])))
    t = time[:, None, None]
    names = ("world", "pictures", "action")
    data["action"] = inputs["action"]
    noise = {name: torch.randn_like(data[name]) for name in names}
    along = {name: (1 - t) * noise[name] + t * data[name] for name in names}
    found = model._velocities(model._context(inputs), along, time)
    squares = (found["pictures"] - (data["pictures"] - noise["pictures"])).square()
    frames = squares.reshape(3, 2, -1).mean(dim=-1)
    # Sample 0 has no future frame, sample 1 one, sample 2 both; every sample has as many actions.
    mean = (0 + frames[1, 0] + frames[2].mean()) / 3
    torch.testing.assert_close(metrics["pictures_loss"], mean)


@pytest.mark.parametrize("camera", [TOP, SIDE])
def test_actions_depend_on_what_every_camera_sees_now(camera: str) -> None:
    model, inputs = policy().eval(), batch()
    before = chunk(model, inputs)
    later = {**inputs, camera: inputs[camera].clone()}
    later[camera][:, 1:] = 0
    torch.testing.assert_close(chunk(model, later), before)  # the future is not peeked at
    blind = {**inputs, camera: torch.zeros_like(inputs[camera])}
    assert (chunk(model, blind) - before).abs().amax(dim=(1, 2)).min() > 1e-4
    torch.testing.assert_close(chunk(model, observation(inputs)), before)


def test_the_future_holds_pictures_of_every_camera() -> None:
    model, inputs = policy().eval(), batch()
    torch.manual_seed(5)
    future = model.predict_future(observation(inputs))
    assert future.world.shape == (3, 2, 5)
    assert future.pictures is not None
    assert future.pictures.shape == (3, 2, 2, 3, 16, 16)
    torch.testing.assert_close(future.action, chunk(model, inputs))


def test_pictures_may_be_read_and_not_predicted() -> None:
    model, inputs = policy(predict_cameras=False).eval(), batch()
    now = {**inputs, TOP: inputs[TOP][:, 0], SIDE: inputs[SIDE][:, 0]}
    assert set(with_noise(model, now)[1]) == {"action_loss", "world_loss"}
    assert model.predict_future(now).pictures is None
    assert TOP not in model.config.delta_timestamps(10)
    assert policy().config.delta_timestamps(10)[TOP] == [0.0, 0.3, 0.6]
    blind = {**now, TOP: torch.zeros_like(now[TOP])}
    assert not torch.allclose(chunk(model, now), chunk(model, blind))


def test_a_text_may_be_given_in_place_of_its_number() -> None:
    model, inputs = policy().eval(), observation(batch())
    texts = {k: v for k, v in inputs.items() if k != "task_index"}
    texts["task"] = [SPEC.tasks[i] for i in inputs["task_index"]]
    texts = Preprocessor()(texts, torch.device("cpu"))
    torch.testing.assert_close(chunk(model, texts), chunk(model, inputs))
    new = chunk(model, {**texts, "task": ["a text that no dataset had"] * 3})
    assert not torch.allclose(new, chunk(model, inputs))


def test_it_learns_what_it_will_see() -> None:
    torch.manual_seed(0)
    model, inputs = policy(), batch(2)
    inputs["observation.state_is_pad"][:] = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = with_noise(model, inputs)[1]["pictures_loss"]
    for _ in range(150):
        optimizer.zero_grad()
        model(inputs)[0].backward()
        optimizer.step()
    assert with_noise(model, inputs)[1]["pictures_loss"] < 0.7 * first
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_a_camera_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names 'front', which the dataset does not have.*side"):
        policy(cameras=("front",))
