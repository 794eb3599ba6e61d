"""`python -m accel_fsdp_tools.cli`: the same as `accel-fsdp`, for a clone that is not installed."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
