"""`python -m accel_fsdp_tools.kernel`: compile the kernel in place, for a clone that is not installed."""

from __future__ import annotations

import sys

from . import describe_kernel, find_kernel
from .building import build_kernel


def main() -> int:
    problem = build_kernel()
    if problem is not None:
        print(f"The kernel was not compiled: {problem}", file=sys.stderr)
        return 1
    print(describe_kernel())
    return 0 if find_kernel() is not None else 1


if __name__ == "__main__":
    sys.exit(main())
