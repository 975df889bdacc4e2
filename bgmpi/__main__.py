"""Lets `python -P -m bgmpi` be the console script, for launchers that start a Python and not a script."""

from __future__ import annotations

import sys

from bgmpi.cli import main

if __name__ == "__main__":
    sys.exit(main())
