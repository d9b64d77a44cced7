"""python -m gates: the `gate` command where PATH lacks it."""

import sys

from gates.cli import main

if __name__ == "__main__":
    sys.exit(main())
