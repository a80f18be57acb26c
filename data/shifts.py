"""FedDRM's covariate shift, which alters the colours of each client's images differently."""

import itertools
from typing import NamedTuple

from torch import Tensor

from posy.settings import SettingsError


class Shift(NamedTuple):
    """A client's image transform. As in FedDRM, it changes saturation, hue and gamma, and then posterises."""

    gamma: float
    hue: float
    saturation: float
    bits: int = 8


_LEVELS = {
    "low": ((0.9, 1.1), (-0.01, 0.01), (0.9, 1.1), (8,)),
    "mid": ((0.75, 1.25), (-0.05, 0.05), (0.7, 1.3), (8,)),
    "high": ((0.6, 1.4), (-0.1, 0.1), (0.5, 1.5), (8,)),
    "grid": ((0.6, 1.0, 1.4), (-0.15, 0.0, 0.15), (0.4, 1.0, 1.6), (8, 2)),
}
# Gamma varies fastest with the client's index, then the hue, the saturation, and the number of bits.
SHIFTS = {
    name: tuple(
        Shift(gamma, hue, saturation, bits)
        for bits, saturation, hue, gamma in itertools.product(all_bits, saturations, hues, gammas)
    )
    for name, (gammas, hues, saturations, all_bits) in _LEVELS.items()
}


def check_shift(level: str, num_clients: int, channels: int = 3) -> None:
    """Raise :class:`SettingsError` unless the level has a shift for each client, and the images are RGB."""
    if level == "none":
        return
    if channels != 3:
        samples = f"images of {channels} channels" if channels else "other samples"
        raise SettingsError(f"shift = {level!r} needs RGB images of 8-bit pixels; this data set has {samples}")
    if num_clients > len(SHIFTS[level]):
        raise SettingsError(
            f"shift = {level!r} has {len(SHIFTS[level])} shifts, one per client; lower num-clients = {num_clients}"
        )


def apply_shift(images: Tensor, shift: Shift) -> Tensor:
    """Apply a client's shift to its images ``(n, 3, H, W)``, uint8, where n may be 0 (FedDRM, section 5)."""
    from torchvision.transforms.v2 import functional  # noqa: PLC0415 - takes seconds to import

    if not len(images):
        return images
    images = functional.adjust_saturation(images, shift.saturation)
    images = functional.adjust_hue(images, shift.hue)
    images = functional.adjust_gamma(images, shift.gamma)
    return images if shift.bits == 8 else functional.posterize(images, shift.bits)
