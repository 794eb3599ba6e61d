"""`python -m accel_fsdp_tools.verify PATH`: the same as `accel-fsdp verify PATH`."""

import sys

from ..cli.main import run_module

if __name__ == "__main__":
    sys.exit(run_module("verify"))
