"""This machine: versions, devices, backends, shared memory, limits."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator
from importlib import metadata

import torch

from tfstyle_dist.comm.host_memory.shared_sums import create_segment, segment_bytes
from tfstyle_dist.comm.rendezvous.bootstrap import available_backends
from tfstyle_dist.core import env, launch_env, network, torch_releases
from tfstyle_dist.doctor.finding import Finding, ok, problem, warning

_FEW_FILES = 1024
_MEGABYTE = 1024 * 1024


def package_version() -> str:
    """The installed version of this package."""
    try:
        return metadata.version("tfstyle_dist")
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> Iterator[Finding]:
    """Python, torch, this package."""
    text = f"Python {platform.python_version()}, torch {torch.__version__}, tfstyle_dist {package_version()}"
    release = torch_releases.release(torch.__version__)
    if release < torch_releases.OLDEST:
        yield problem("versions", text, "install torch 2.9 or later")
    elif release > torch_releases.NEWEST:
        yield warning("versions", text, "this torch is untested: run `make canary` in a clone of tfstyle_dist")
    elif sys.platform != "linux":
        yield warning("versions", f"{text} on {sys.platform}", "only Linux is tested")
    else:
        yield ok("versions", f"{text}, {platform.platform()}")


def devices() -> Iterator[Finding]:
    """Cores and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield ok("devices", f"{cores} CPU core(s) for this process, {torch.get_num_threads()} thread(s) for torch's math")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    present = launch_env.visible_gpus()
    if gpus:
        yield ok("devices", f"{gpus} GPU(s): {', '.join(names)}")
    elif present:
        yield problem(
            "devices",
            f"this machine has {len(present)} NVIDIA GPU(s), but torch sees none (built for CUDA {torch.version.cuda})",
            "install a CUDA build of torch that fits the driver, or set CUDA_VISIBLE_DEVICES= to train on the CPU",
        )
    else:
        yield ok("devices", "no GPU: replicas run on the CPU")


def backends() -> Iterator[Finding]:
    """What can carry collectives."""
    found = available_backends()
    if "gloo" in found:
        yield ok("backends", "Gloo")
    else:
        yield problem("backends", "Gloo is missing from this torch build", "install an official build of torch")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if "nccl" in found:
        version = ".".join(str(part) for part in torch.cuda.nccl.version()) if gpus else "not loaded without a GPU"
        yield ok("backends", f"NCCL ({version})")
    elif gpus:
        yield warning("backends", "there are GPUs, but torch has no NCCL", "gradients will go through Gloo, slowly")


def shared_memory() -> Iterator[Finding]:
    """Where CPU workers of one host meet."""
    if not env.shared_memory():
        yield warning("shared memory", "TFSTYLE_SHARED_MEMORY=0", "CPU workers of one host use sockets, slowly")
        return
    handle = create_segment(2)
    if handle is None:
        yield warning(
            "shared memory",
            "none can be made: it needs Linux on x86-64 with memfd_create, and a file and memory that are free",
            "workers will use sockets, slowly; look at the limits of this container",
        )
        return
    os.close(handle)
    workers = max(os.cpu_count() or 1, 2)
    yield ok("shared memory", f"{workers} workers share {segment_bytes(workers) // _MEGABYTE} MB, which have no name")


def limits() -> Iterator[Finding]:
    """What the operating system allows."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < files < _FEW_FILES:
        yield warning("limits", f"at most {files} open files", f"raise it: ulimit -n {min(65536, most)}")
    else:
        yield ok("limits", f"at most {files} open files")


def host_name() -> Iterator[Finding]:
    """Whether this host's name leads other hosts to it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield warning("host name", f"{name!r} does not resolve", "with several hosts, add it to DNS or /etc/hosts")
        return
    if address.startswith("127."):
        yield warning(
            "host name",
            f"{name!r} resolves to {address}, which other hosts cannot reach",
            "with several hosts, use addresses in TF_CONFIG or MASTER_ADDR; the network interface is chosen by them",
        )
    else:
        yield ok("host name", f"{name} is {address}")
    yield _interfaces()


def _interfaces() -> Finding:
    wanted = env.gloo_interface()
    names = [one for _, one in socket.if_nameindex()]
    if wanted and wanted not in names:
        return problem(
            "network",
            f"GLOO_SOCKET_IFNAME={wanted}, but this host has {', '.join(names)}",
            "unset it, or name one of these",
        )
    places = [f"{one} ({network.interface_address(one) or 'no IPv4 address'})" for one in names]
    return ok("network", f"interfaces {', '.join(places)}")
