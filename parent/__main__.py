"""`python -m parent`: the same as the console script `mlxd`."""

import sys

from parent.cli import main

if __name__ == "__main__":
    sys.exit(main())
