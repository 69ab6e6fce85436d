"""What a pull and a push cost over plain TCP, Gloo and ZeroMQ on this machine: is a process-group lane worth it?

    python benchmarks/parameter_server_transports.py --megabytes 4 --out results.json

One client asks for the parameters, multiplies them, and sends the product; the server subtracts it. No lane can be
faster over TCP than the first row, a loop over one socket. Gloo is a group of two ranks, as a link would be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

import torch
import zmq

from tfstyle_dist.coordinator.server import keep_memory
from tfstyle_dist.core.network import free_ports

HOST = "127.0.0.1"


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def receive(sock: socket.socket, data: memoryview) -> None:
    got = 0
    while got < len(data):
        got += sock.recv_into(data[got:])


def tcp(serves: bool, port: int, size: int, rounds: int) -> Any:
    if serves:
        with socket.create_server((HOST, port)) as listener:
            link, _ = listener.accept()
    else:
        link = connect(port)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(parameters: torch.Tensor, gradient: torch.Tensor) -> None:
        link.recv(1)
        link.sendall(view(parameters))
        receive(link, view(gradient))

    def step(parameters: torch.Tensor) -> None:
        link.sendall(b"g")
        receive(link, view(parameters))
        link.sendall(view(parameters * 1e-6))

    return run(serves, size, rounds, serve, step)


def connect(port: int) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection((HOST, port))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"nobody listens at port {port}")


def gloo(serves: bool, port: int, size: int, rounds: int) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://{HOST}:{port}", rank=0 if serves else 1, world_size=2)
    asked = torch.zeros(1)

    def serve(parameters: torch.Tensor, gradient: torch.Tensor) -> None:
        dist.recv(asked, 1)
        dist.send(parameters, 1)
        dist.recv(gradient, 1)

    def step(parameters: torch.Tensor) -> None:
        dist.send(asked, 0)
        dist.recv(parameters, 0)
        dist.send(parameters * 1e-6, 0)

    try:
        return run(serves, size, rounds, serve, step)
    finally:
        dist.destroy_process_group()


def zeromq(piece: int) -> Any:
    def link(serves: bool, port: int, size: int, rounds: int) -> Any:
        context = zmq.Context()
        sock = context.socket(zmq.ROUTER if serves else zmq.DEALER)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        if serves:
            sock.bind(f"tcp://{HOST}:{port}")
        else:
            sock.connect(f"tcp://{HOST}:{port}")

        def serve(parameters: torch.Tensor, gradient: torch.Tensor) -> None:
            client, _ = sock.recv_multipart()
            data, got, room = view(parameters), 0, view(gradient)
            for offset in range(0, len(data), piece):
                sock.send(client, zmq.SNDMORE)
                sock.send(data[offset : offset + piece])
            while got < len(room):
                sock.recv()
                got += sock.recv_into(room[got : got + piece])

        def step(parameters: torch.Tensor) -> None:
            sock.send(b"g")
            room, got = view(parameters), 0
            while got < len(room):
                got += sock.recv_into(room[got : got + piece])
            data = view(parameters * 1e-6)
            for offset in range(0, len(data), piece):
                sock.send(data[offset : offset + piece])

        try:
            return run(serves, size, rounds, serve, step)
        finally:
            context.destroy(linger=1000)

    return link


def run(serves: bool, size: int, rounds: int, serve: Any, step: Any) -> Any:
    """Steps per second and CPU ms of a step; the first tenth is not counted."""
    parameters, gradient = torch.zeros(size), torch.zeros(size)
    begin, cpu = 0.0, 0.0
    for number in range(rounds):
        if number == rounds // 10:
            begin, cpu = time.perf_counter(), time.process_time()
        if serves:
            serve(parameters, gradient)
            parameters.sub_(gradient)
        else:
            step(parameters)
    counted = rounds - rounds // 10
    return counted / (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu) / counted


def server(link: Any, port: int, size: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    results.put(link(True, port, size, rounds))


LINKS = {
    "TCP socket": tcp,
    "Gloo": gloo,
    "ZeroMQ, 1 MB messages": zeromq(1 << 20),
    "ZeroMQ, 256 KB messages": zeromq(1 << 18),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as the tasks do
    fork = multiprocessing.get_context("fork")
    size = options.megabytes << 18
    rows = []
    for name, link in LINKS.items():
        (port,), results = free_ports(1), fork.Queue()
        process = fork.Process(target=server, args=(link, port, size, options.rounds, results))
        process.start()
        rate, client = link(False, port, size, options.rounds)
        _, served = results.get(timeout=60)
        process.join()
        rows.append({"link": name, "per_s": rate, "client_cpu_ms": client, "server_cpu_ms": served})
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    title = f"{machine}; {options.megabytes} MB pulled and {options.megabytes} MB pushed a step"
    lines = [title, "", "| link | steps/s | CPU ms of a step: client | server |", "|---|---|---|---|"]
    for r in rows:
        lines.append(f"| {r['link']} | {r['per_s']:.0f} | {r['client_cpu_ms']:.2f} | {r['server_cpu_ms']:.2f} |")
    text = "\n".join(lines) + "\n"
    if options.out:
        options.out.write_text(json.dumps({"title": title, "rows": rows}, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
