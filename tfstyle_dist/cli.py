"""The command ``tfstyle-dist``: one name for what ``python -m tfstyle_dist.<module>`` runs as well."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "launch": ("tfstyle_dist.launch.__main__", "start a cluster on this machine: workers, parameter servers, a chief"),
    "doctor": (
        "tfstyle_dist.doctor.__main__",
        "say what on this machine or in the cluster would keep a job from running",
    ),
    "compare": ("tfstyle_dist.compare_aggregation.__main__", "time every aggregation method and strategy at hand"),
    "keys": ("tfstyle_dist.parameter_server.keys", "make the key file of a cluster with parameter servers"),
    "foreign": ("tfstyle_dist.testing.foreign", "train other people's code in every form, and compare with one device"),
    "report": ("tfstyle_dist.monitoring.__main__", "show a saved report of where the time of a step goes"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        arguments: the command line without the program's name; default: that of the process.

    Returns:
        Its exit status.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    # The rest belongs to the command, options too.
    options = _parser().parse_args(given[:1])
    module = importlib.import_module(_COMMANDS[options.command][0])
    status: int = module.main(given[1:])
    return status


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:9}{what}" for name, (_, what) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        "tfstyle-dist",
        description="tf.distribute for PyTorch.",
        usage="tfstyle-dist [--version] COMMAND ...",
        epilog=f"commands:\n{lines}\n\n`tfstyle-dist COMMAND --help` says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.import_module("tfstyle_dist").__version__
    parser.add_argument("--version", action="version", version=f"tfstyle_dist {version}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
