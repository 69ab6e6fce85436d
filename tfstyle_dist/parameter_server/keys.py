"""``python -m tfstyle_dist.parameter_server.keys PATH`` makes the key file of a cluster (mode 0600)."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Writes a key file; the exit code."""
    if arguments in (["-h"], ["--help"]):
        print(
            "usage: python -m tfstyle_dist.parameter_server.keys PATH\n\nMakes the key file of a cluster: whoever has "
            "it belongs to the cluster. It is readable by its owner\nonly, and a file that is there is left as it is."
        )
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m tfstyle_dist.parameter_server.keys PATH", file=sys.stderr)
        return 2
    from tfstyle_dist.parameter_server.protocol.zeromq_sockets import new_keys

    try:
        new_keys(arguments[0])
    except FileExistsError:
        print(f"{arguments[0]} exists; it was left as it is", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{arguments[0]} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"Wrote {arguments[0]}. Copy it to every task and set TFSTYLE_PS_KEYS to its path.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
