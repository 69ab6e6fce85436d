"""A parameter server cluster of real processes on this machine, for the recorded programs.

A zygote is forked while the process has one thread only; it forks one process for each task on command, so a task
starts in milliseconds and can be killed and started again while the coordinator works.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal

import tfstyle_dist as td
from tfstyle_dist.core.network import free_ports


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Zygote:
    def __init__(self):
        command, self.command = os.pipe()
        self.answer, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent()
                os.close(self.command)
                os.close(self.answer)
                self._serve(command, answer)
            finally:
                os._exit(0)
        os.close(command)
        os.close(answer)

    def _serve(self, command, answer):
        children = set()
        for line in os.fdopen(command):
            message = json.loads(line)
            if message["op"] == "start":
                pid = os.fork()
                if pid == 0:
                    try:
                        die_with_parent()
                        td.Server(message["spec"], job_name=message["job"], task_index=message["index"]).join()
                    finally:
                        os._exit(1)
                children.add(pid)
                os.write(answer, b"%d\n" % pid)
            else:
                os.kill(message["pid"], signal.SIGKILL)
                os.waitpid(message["pid"], 0)
                children.discard(message["pid"])
                os.write(answer, b"0\n")
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def call(self, **message):
        os.write(self.command, (json.dumps(message) + "\n").encode())
        text = b""
        while not text.endswith(b"\n"):
            text += os.read(self.answer, 100)
        return int(text)

    def close(self):
        os.close(self.command)
        os.close(self.answer)
        os.waitpid(self.pid, 0)


class Cluster:
    def __init__(self, num_workers, num_ps, partitioner=None):
        self.zygote = Zygote()
        addresses = [f"127.0.0.1:{p}" for p in free_ports(num_workers + num_ps + 1)]
        self.spec = {
            "worker": addresses[:num_workers],
            "ps": addresses[num_workers : num_workers + num_ps],
            "chief": addresses[-1:],
        }
        self.pids = {}
        for job in ("worker", "ps"):
            for index in range(len(self.spec[job])):
                self.start(job, index)
        resolver = td.cluster_resolver.SimpleClusterResolver(
            td.cluster_resolver.ClusterSpec(self.spec), task_type="chief", task_id=0
        )
        self.strategy = td.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
        self.coordinator = td.coordinator.ClusterCoordinator(self.strategy)

    def start(self, job, index):
        self.pids[job, index] = self.zygote.call(op="start", spec=self.spec, job=job, index=index)

    def kill(self, job, index):
        self.zygote.call(op="kill", pid=self.pids.pop((job, index)))

    def kill_worker(self, index):
        self.kill("worker", index)

    def restart_worker(self, index):
        self.start("worker", index)

    def kill_ps(self, index):
        self.kill("ps", index)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.strategy.close()
        self.zygote.close()
