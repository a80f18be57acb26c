"""Augmentation by flips and torchvision's transforms, with separate random numbers for each image."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import posy
from posy.client_app.training.batches import Augment
from posy.client_app.workspace import Workspace
from posy.commands.cli import main
from posy.data.augment import flip
from posy.data.transforms import check_transforms, kinds
from posy.settings import SettingsError
from posy.storage import load_arrays
from posy.strategies.registry import read_settings

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 8, 10, 3), np.uint8)


@pytest.fixture(params=[np.uint8, np.float32])
def images(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the path of images with bytes or scaled pixels."""
    x = PIXELS if request.param is np.uint8 else (PIXELS / 255).astype(np.float32)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(60) % 3)
    return str(tmp_path / "a.npz")


def load_augmented(data: str, seed: int = 0, **settings: str) -> tuple[Workspace, Augment, Tensor]:
    config = {"method": "fedavg", "dataset": data, "num-clients": 2, "partition": "iid", "device": "cpu"}
    workspace = Workspace(read_settings({**config, **settings}))
    augment = workspace.augment(lambda: torch.Generator().manual_seed(seed))
    assert augment is not None
    return workspace, augment, workspace.client_data(0).x_train


def to_pixels(workspace: Workspace, x: Tensor) -> Tensor:
    """Return the pixels of normalised images before normalisation, from 0 to 1."""
    mean, std = (torch.from_numpy(v).view(-1, 1, 1) for v in (workspace.dataset.mean, workspace.dataset.std))
    return x * std + mean


def test_flip_by_hand() -> None:
    x = torch.arange(12.0).view(2, 1, 2, 3)
    changed = flip(x, torch.tensor([[0.49], [0.5]]))
    assert changed.tolist() == [[[[2, 1, 0], [5, 4, 3]]], [[[6, 7, 8], [9, 10, 11]]]]


def test_half_of_the_images_are_mirrored(images: str) -> None:
    _, augment, x = load_augmented(images, augment="flip")
    many = x[:1].expand(2000, -1, -1, -1)
    changed = augment.change(many, augment.numbers([1000, 1000]))
    mirrored = (changed == many.flip(3)).all(dim=(1, 2, 3))
    assert ((changed == many).all(dim=(1, 2, 3)) ^ mirrored).all()
    assert abs(float(mirrored.float().mean()) - 0.5) < 0.04


def test_transforms_see_pixels_from_0_to_1(images: str) -> None:
    workspace, augment, x = load_augmented(images, transforms="RandomInvert(1.0), RandomVerticalFlip(p=1)")
    changed = to_pixels(workspace, augment.change(x, augment.numbers([len(x)])))
    torch.testing.assert_close(changed, 1 - to_pixels(workspace, x).flip(2), rtol=0, atol=1e-6)


def test_each_image_uses_its_own_random_numbers(images: str) -> None:
    words = "RandomRotation(40), ColorJitter(0.5, 0.5, 0.5, 0.1), RandAugment, GaussianNoise(sigma=0.1)"
    _, augment, x = load_augmented(images, augment="crop-flip", transforms=words)
    rng_state, original = torch.random.get_rng_state(), x.clone()
    numbers = augment.numbers([len(x)])
    changed = augment.change(x, numbers)
    reversed_order = torch.arange(len(x)).flip(0)
    assert torch.equal(augment.change(x[reversed_order], numbers[reversed_order]), changed[reversed_order])
    assert torch.equal(augment.change(x[3:4], numbers[3:4]), changed[3:4])
    same = augment.change(x[:1].expand(len(x), -1, -1, -1), numbers)
    assert len({image.numpy().tobytes() for image in same}) == len(x)
    assert torch.equal(torch.random.get_rng_state(), rng_state) and torch.equal(x, original)


@pytest.mark.parametrize("settings", [{"augment": "flip"}, {"transforms": "RandomRotation(15), RandomErasing(p=0.5)"}])
def test_stacked_and_looped_clients_get_the_same_augmentation(settings: dict[str, str], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=PIXELS, y_train=np.arange(60) % 3)
    shared = {"method": "fedavg", "dataset": str(tmp_path / "a.npz"), "num_clients": 3, "num_server_rounds": 2}
    shared |= {"model": "mlp", "device": "cpu", "lr": 0.05}
    for stack in ("loop", "vmap"):
        posy.run(**shared, **settings, stack=stack, run_name=stack, output_dir=str(tmp_path))
    posy.run(**shared, run_name="plain", output_dir=str(tmp_path))
    loop, vmap, plain = (load_arrays(tmp_path / n / "models/server.safetensors") for n in ("loop", "vmap", "plain"))
    for name, array in loop.items():
        np.testing.assert_allclose(vmap[name], array, rtol=0, atol=1e-5)
    assert any(np.abs(plain[name] - array).max() > 1e-3 for name, array in loop.items())


WRONG = {
    "CutMix": "CutMix fails for the images of the data, which have the shape 3x8x10 (ValueError",
    "RandomResizedCrop(7)": "RandomResizedCrop returns images of shape 3x7x7 and type torch.float32",
    "ToPILImage": "ToPILImage returns an object of type Image",
    "RandomRotatio(3)": "has no transform RandomRotatio; did you mean RandomRotation or ",
    "randomrot(3)": "has no transform randomrot; did you mean RandomRotation or ",
    "RandomRotation": "RandomRotation does not take these arguments (TypeError",
    "RandomRotation(-1)": "RandomRotation does not take these arguments (ValueError",
    "RandomInvert(p=open('x'))": "the arguments of RandomInvert are not literals",
    "RandomInvert(**3)": "RandomInvert does not take these arguments (TypeError",
    "__import__('os')": "has no transform __import__",
    "functional": "has no transform functional",
    "v2.RandomInvert()": "names of torchvision.transforms.v2",
    "RandomInvert(": "names of torchvision.transforms.v2",
    " ": "names of torchvision.transforms.v2",
    "RandomInvert], [": "names of torchvision.transforms.v2",
}


@pytest.mark.parametrize("text", WRONG)
def test_invalid_transforms_are_rejected(text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        check_transforms(text, (3, 8, 10))
    assert WRONG[text] in str(raised.value) and f"transforms = {text!r}" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Grayscale(3)", "Grayscale"),
        ("RandomInvert, Normalize([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])", "Normalize"),
        ("RandomRotation(15, fill=(1, 2, 3))", "RandomRotation"),
        ("RandomErasing(p=0.2, value=(1.0, 2.0, 3.0))", "RandomErasing"),
    ],
)
def test_colour_transforms_are_rejected_for_grey_images(text: str, name: str) -> None:
    """RandomErasing fails only in the draws in which it erases, 1 of 5."""
    with pytest.raises(SettingsError) as raised:
        check_transforms(text, (1, 8, 8), "digits")
    message = str(raised.value)
    assert message.startswith(f"transforms = {text!r}: {name} suits images of 3 channels")
    assert "images of digits have 1 channel" in message and f"remove {name}" in message


def test_colour_transform_errors_name_the_data_set_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "transforms=RGB"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("posy: transforms = 'RGB' on the command line: RGB suits images of 3 channels")
    assert "images of digits have 1 channel" in error and error.count("\n") == 1


def test_augmentation_needs_images(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.random.default_rng(0).normal(size=(60, 4)), y_train=np.arange(60) % 3)
    for settings in ({"augment": "flip"}, {"transforms": "RandomInvert"}):
        with pytest.raises(SettingsError, match=f"{next(iter(settings))} = .* needs images"):
            posy.run(dataset=str(tmp_path / "a.npz"), **settings)  # type: ignore[arg-type]


def test_known_transforms_are_accepted() -> None:
    assert {"RandAugment", "RandomHorizontalFlip", "ColorJitter"} <= kinds().keys()
    for name in ("RandAugment", "TrivialAugmentWide", "AugMix", "AutoAugment", "RandomErasing", "RandomPerspective"):
        check_transforms(name, (3, 32, 32))
