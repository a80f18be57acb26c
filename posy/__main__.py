"""`python -m posy` is `posy`."""

import sys

from posy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
