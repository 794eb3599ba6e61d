"""`python -m accel_fsdp_tools.kernel`: say whether the compiled kernel is in use; compile it where it is missing."""

from __future__ import annotations

import argparse
import sys

from . import describe_kernel, forget_kernel, is_left_out
from .building import build_kernel


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m accel_fsdp_tools.kernel",
        description="Say whether the compiled kernel is in use; where it is missing or was compiled of another source, "
        "compile it, in place. Exit code 0 if it is in use.",
    )
    parser.add_argument("--rebuild", action="store_true", help="compile it even if it is there")
    arguments = parser.parse_args()
    is_used, found = describe_kernel()
    if arguments.rebuild or (not is_used and not is_left_out()):
        problem = build_kernel()
        if problem is not None:
            print(f"The kernel was not compiled: {problem}", file=sys.stderr)
            return 1
        forget_kernel()
        is_used, found = describe_kernel()
    print(found)
    return 0 if is_used else 1


if __name__ == "__main__":
    sys.exit(main())
