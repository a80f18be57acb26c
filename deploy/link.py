"""The SuperLink's process: ``python -m posy.deploy.link`` takes the arguments of ``flower-superlink``.

It is Flower's SuperLink with fewer and safer writes to its database (:mod:`posy.deploy.database`).
"""

import sys
from importlib.metadata import entry_points
from logging import WARNING

from flwr.common.logger import log


def main() -> None:
    """Run the SuperLink."""
    try:
        from posy.deploy.database import apply_patches  # noqa: PLC0415 - Flower may lack its names
    except ImportError as missing:
        log(
            WARNING,
            "posy: this version of Flower is not supported (%s): the SuperLink runs unchanged, and slower",
            missing,
        )
    else:
        apply_patches()
    [command] = entry_points(group="console_scripts", name="flower-superlink")
    sys.argv[0] = command.name
    command.load()()


if __name__ == "__main__":
    main()
