"""Ranks take no port of their own, and a port that a test leaves open is free after the session."""

from __future__ import annotations

import socket

import pytest
from inner_pytest import InnerPytest


def test_no_port_outlives_the_session(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
        import os
        import socket
        import subprocess
        from pathlib import Path

        import pytest

        LEFT = []

        @pytest.mark.distributed
        def test_leaves_a_port(rank):
            inodes = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
            mine = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                    if os.path.lexists(f"/proc/self/fd/{name}")]
            assert not [link for link in mine if link[8:-1] in inodes], "the rank already has a connection"
            LEFT.append(socket.create_server(("127.0.0.1", 0)))
            LEFT[0].set_inheritable(True)
            if rank == 0:  # a child of the rank holds it too
                subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
            with open(Path(__file__).parent / "ports", "a") as stream:
                stream.write(f"{LEFT[0].getsockname()[1]}\\n")
        """,
    )
    result.assert_outcomes(passed=1)
    ports = [int(port) for port in inner.lines("ports")]
    assert len(ports) == 2
    for port in ports:
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", port))
