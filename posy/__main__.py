"""Run the `posy` command for `python -m posy`."""

import sys

from posy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
