"""FedDRM's covariate shift."""

import colorsys

import numpy as np
import pytest
import torch

from posy.data.client import client_data
from posy.data.dataset import make_dataset
from posy.data.partitions import Partition, partition
from posy.data.settings import DataSettings
from posy.data.shifts import SHIFTS, Shift, apply_shift, check_shift
from posy.settings import SettingsError

CPU = torch.device("cpu")


def pixel(*rgb):
    return torch.tensor(rgb, dtype=torch.uint8).reshape(1, 3, 1, 1)


def test_bits_of_the_client_number_select_the_shift():
    assert SHIFTS["high"][0] == Shift(0.6, -0.1, 0.5)
    assert SHIFTS["high"][1] == Shift(1.4, -0.1, 0.5)
    assert SHIFTS["high"][2] == Shift(0.6, 0.1, 0.5)
    assert SHIFTS["high"][4] == Shift(0.6, -0.1, 1.5)
    assert SHIFTS["high"][7] == Shift(1.4, 0.1, 1.5)
    assert SHIFTS["low"][5] == Shift(1.1, -0.01, 1.1)
    assert SHIFTS["mid"][6] == Shift(0.75, 0.05, 1.3)


def test_the_grid_has_54_different_shifts():
    assert len(set(SHIFTS["grid"])) == len(SHIFTS["grid"]) == 54
    assert {shift.bits for shift in SHIFTS["grid"]} == {8, 2}
    assert {shift.gamma for shift in SHIFTS["grid"]} == {0.6, 1.0, 1.4}
    assert {shift.hue for shift in SHIFTS["grid"]} == {-0.15, 0.0, 0.15}
    assert {shift.saturation for shift in SHIFTS["grid"]} == {0.4, 1.0, 1.6}
    assert all(len(set(SHIFTS[level])) == 8 for level in ("low", "mid", "high"))


def test_the_neutral_shift_changes_nothing():
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    difference = apply_shift(images, Shift(1.0, 0.0, 1.0)).int() - images.int()
    assert difference.abs().max() <= 1  # the conversion to HSV and back rounds


def test_gamma_by_hand():
    # 255 * (64 / 255)^2 = 16.06
    assert apply_shift(pixel(64, 64, 64), Shift(2.0, 0.0, 1.0)).flatten().tolist() == [16, 16, 16]


def test_hue_by_hand():
    # a third of the circle turns red into green
    assert apply_shift(pixel(200, 0, 0), Shift(1.0, 1 / 3, 1.0)).flatten().tolist() == [0, 200, 0]


def test_saturation_by_hand():
    # halfway to the grey value 0.2989 * 200 + 0.587 * 100 + 0.114 * 0 = 118.5
    shifted = apply_shift(pixel(200, 100, 0), Shift(1.0, 0.0, 0.5)).flatten()
    assert abs(shifted - torch.tensor([159, 109, 59])).max() <= 1


def test_posterising_keeps_two_bits():
    assert apply_shift(pixel(200, 100, 63), Shift(1.0, 0.0, 1.0, 2)).flatten().tolist() == [192, 64, 0]


def test_the_order_is_saturation_hue_gamma():
    grey = 0.2989 * 200 + 0.587 * 100 + 0.114 * 20
    desaturated = [0.5 * value + 0.5 * grey for value in (200, 100, 20)]
    hue, saturation, value = colorsys.rgb_to_hsv(*(v / 255 for v in desaturated))
    rotated = colorsys.hsv_to_rgb((hue + 0.1) % 1, saturation, value)
    expected = torch.tensor([255 * v**0.6 for v in rotated])
    shifted = apply_shift(pixel(200, 100, 20), Shift(0.6, 0.1, 0.5)).flatten()
    assert (shifted - expected).abs().max() < 2.5  # rounded three times
    other_order = torch.tensor([255 * (v / 255) ** 0.6 for v in (200, 100, 20)])
    assert (shifted - other_order).abs().max() > 20


def test_shift_levels_limit_the_number_of_clients():
    check_shift("none", 1000, 1)
    check_shift("high", 8)
    check_shift("grid", 54)
    with pytest.raises(SettingsError, match="num-clients = 9"):
        check_shift("high", 9)
    with pytest.raises(SettingsError, match="'grid' has 54 shifts"):
        check_shift("grid", 55)
    with pytest.raises(SettingsError, match=r"needs RGB images of 8-bit pixels; .* 1 channels"):
        check_shift("low", 2, 1)


def rgb(n, dtype=np.uint8):
    x = np.random.default_rng(0).integers(0, 256, (n, 4, 4, 3)).astype(dtype)
    return make_dataset("rgb", "image", x, np.arange(n) % 2, ("a", "b"))


def test_a_client_has_the_same_shift_in_training_and_test_data():
    data = rgb(6)
    rows = np.arange(6)
    part = Partition((rows, rows), (rows, np.array([], np.int64)))
    plain = client_data(data, part, 1, DataSettings(), CPU)
    first = client_data(data, part, 0, DataSettings(shift="high"), CPU)
    second = client_data(data, part, 1, DataSettings(shift="high"), CPU)
    assert torch.equal(first.x_train, first.x_test)
    assert (first.x_train - second.x_train).abs().max() > 0.1  # gamma 0.6 and 1.4
    assert (first.x_train.mean() - second.x_train.mean()) > 0.1
    assert (plain.x_train - second.x_train).abs().max() > 0.1
    assert second.x_test.shape == (0, 3, 4, 4)
    assert first.x_train.is_contiguous(memory_format=torch.channels_last)
    assert first.x_train.min() >= -1
    assert first.x_train.max() <= 1
    raw = torch.from_numpy(data.x).permute(0, 3, 1, 2)
    expected = apply_shift(raw, Shift(0.6, -0.1, 0.5)).float() / 127.5 - 1
    assert torch.allclose(first.x_train, expected, atol=1e-6)
    assert np.array_equal(data.x, rgb(6).x)  # the data set itself is unchanged


def test_scaled_images_are_rejected():
    with pytest.raises(SettingsError, match=r"8-bit pixels; .* other samples"):
        partition(rgb(2, np.float32), DataSettings(shift="low", num_clients=1, partition="iid"), 0)
