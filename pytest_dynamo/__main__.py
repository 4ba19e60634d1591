"""``python -m pytest_dynamo`` is the command ``pytest-dynamo``."""

from __future__ import annotations

import sys

from pytest_dynamo.cli import main


if __name__ == "__main__":
    sys.exit(main())
