"""`python -m posy` is `posy`."""

import sys

from posy.cli import main

if __name__ == "__main__":
    sys.exit(main())
