"""Let `python -m posy` run the `posy` command."""

import sys

from posy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
