"""Addresses and ports of this host."""

from __future__ import annotations

import atexit
import fcntl
import random
import socket
import struct
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

from tfstyle_dist.core.processes import link_target

_LISTENING = "0A"
_SIOCGIFADDR = 0x8915
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _FEW_PORTS, _TRIES = 10_000, 1000, 100
_PROBE_SECONDS = 1.0
_MOST_MARKS = 16  # those of the last call besides
_marks: deque[socket.socket] = deque()


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``"host:port"``; an IPv6 host stands in brackets.

    Raises:
        ValueError: there is no port, or it is no number from 1 to 65535.
    """
    host, colon, port = text.rpartition("://")[2].rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"Address {text!r} must have the form 'host:port', e.g. 'host0:2222', with a port up to 65535."
        )
    return host.strip("[]"), int(port)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now; all different.

    They are no ephemeral ports if the host leaves any others: those the kernel gives to anybody who does not ask for a
    certain one, so another process could have them before they are used. Nor are they what another process found here
    that still runs, of the last few.

    Args:
        count: how many.
        host: the local address they are to be used with.
    """
    while len(_marks) > _MOST_MARKS:
        _marks.popleft().close()
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        return [_bind_somewhere(one, host) for one in found]


def _bind_somewhere(one: socket.socket, host: str) -> int:
    first = _first_ephemeral_port()
    for _ in range(_TRIES if first - _FIRST_PORT >= _FEW_PORTS else 0):
        port = random.SystemRandom().randrange(_FIRST_PORT, first)
        with suppress(OSError):
            _mark(port)
            one.bind((host, port))
            return port
    one.bind((host, 0))
    port = int(one.getsockname()[1])
    with suppress(OSError):
        _mark(port)
    return port


def _mark(port: int) -> None:
    """Keeps other processes that look for a port from finding this one before it is used.

    Raises:
        OSError: another one found it just now.
    """
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0tfstyle_dist/port/{port}")
    except OSError:
        mark.close()
        raise
    _marks.append(mark)


@atexit.register
def _forget_marks() -> None:
    while _marks:
        _marks.pop().close()


def _first_ephemeral_port() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(_EPHEMERAL.read_text().split()[0])
    return 0


def port_owner(port: int) -> str | None:
    """Which process of this host listens on a port, e.g. ``"pid 17 (python train.py)"``.

    Returns:
        ``None`` when nobody listens; ``"a process of another user"`` when it cannot be seen.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if any(link_target(handle) in inodes for handle in (process / "fd").iterdir()):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    return f"pid {process.name} ({command[:120]})"
    return "a process that this user cannot see"


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface; ``None`` without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_towards(host: str, port: int) -> str | None:
    """The network interface through which this host reaches another one; nothing is sent.

    Args:
        host: name or IPv4 address of the other.
        port: any.

    Returns:
        e.g. ``"eth0"``; ``None`` if that cannot be told.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            own = probe.getsockname()[0]
    except OSError:
        return None
    for _, name in socket.if_nameindex():
        address = interface_address(name)
        if address is not None and (address == own or (address.startswith("127.") and own.startswith("127."))):
            return name
    return None


def try_connect(host: str, port: int, seconds: float) -> str | None:
    """Connects once.

    Args:
        host: name or address.
        port: its port.
        seconds: limit of the attempt.

    Returns:
        ``None`` if somebody listens there, else what went wrong.
    """
    try:
        socket.create_connection((host, port), timeout=max(seconds, 0.01)).close()
    except socket.gaierror as error:
        return f"the name {host!r} does not resolve: {error.strerror}"
    except ConnectionRefusedError:
        return "nobody listens there (connection refused)"
    except TimeoutError:
        return "no answer (a firewall, or an address of another network)"
    except OSError as error:
        return error.strerror or str(error)
    return None


def addresses_of(host: str) -> list[str]:
    """The addresses of a name, or an address itself; none if nobody knows the name."""
    with suppress(OSError):
        return [str(found[4][0]) for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    return []


def is_own_address(host: str) -> bool:
    """Whether an interface of this host has one of the addresses of a name, or an address."""
    for address in addresses_of(host):
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return True
    return False


def is_listening(address: str, unreachable: bool = False) -> bool:
    """Whether something takes connections at ``host:port``; ``unreachable`` where the network does not tell."""
    try:
        socket.create_connection(parse_address(address), _PROBE_SECONDS).close()
    except OSError as error:  # a name that is not known yet, a slow network, or no process at that port
        return unreachable and not isinstance(error, ConnectionRefusedError)
    return True
