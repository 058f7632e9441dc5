"""`python -m mpitp` is the `mpitp` command."""

import sys

from mpitp.cli import main

if __name__ == "__main__":
    sys.exit(main())
