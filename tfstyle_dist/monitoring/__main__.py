"""Shows a report that ``strategy.report().save(path)`` wrote: ``python -m tfstyle_dist.monitoring PATH``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tfstyle_dist.monitoring import saved


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report, and draws it if asked; the exit status."""
    parser = argparse.ArgumentParser(
        "python -m tfstyle_dist.monitoring", description="Shows where the time of a training step goes."
    )
    parser.add_argument("report", type=Path, help="a file that strategy.report().save(path) wrote")
    parser.add_argument("--plot", type=Path, help="write a picture to this file (needs matplotlib)")
    options = parser.parse_args(arguments)
    try:
        report = saved.load(options.report)
        print(report)
        if options.plot is not None:
            report.plot(options.plot)
            print(f"wrote {options.plot}")
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
