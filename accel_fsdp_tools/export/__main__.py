"""`python -m accel_fsdp_tools.export CKPT OUT`: the same as `accel-fsdp export CKPT OUT`."""

import sys

from ..cli.main import run_module

if __name__ == "__main__":
    sys.exit(run_module("export"))
