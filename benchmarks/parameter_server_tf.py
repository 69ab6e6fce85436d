"""The cases of ``parameter_server.py`` on TensorFlow; run by it in an interpreter that has TensorFlow.

python benchmarks/parameter_server_tf.py --cases noop,latency,dense1M,sgd1M,many,rows,kill,server_kill

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from scheduling import seconds_to_error, throughput

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
MEGA = 1 << 20


def serve(job: str, index: int, spec: dict[str, list[str]]) -> None:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    if job == "worker":
        config.inter_op_parallelism_threads = max(4, os.cpu_count() or 1)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(spec), job_name=job, task_index=index, protocol="grpc", config=config, start=True
    )
    print("up", flush=True)
    server.join()


class Cluster:
    """Worker and ps processes of this machine."""

    def __init__(self, workers: int, ps: int) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers + ps + 1)]
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        for s in sockets:
            s.close()
        self.spec = {"worker": addresses[:workers], "ps": addresses[workers:-1], "chief": addresses[-1:]}
        self.tasks: dict[tuple[str, int], subprocess.Popen[str]] = {}
        for job in ("ps", "worker"):
            for index in range(len(self.spec[job])):
                self.start(job, index)
        for task in self.tasks.values():
            assert task.stdout is not None
            task.stdout.readline()

    def start(self, job: str, index: int) -> None:
        """Starts a task."""
        command = [sys.executable, __file__, "--task", job, str(index), "--spec", json.dumps(self.spec)]
        self.tasks[job, index] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def kill(self, job: str, index: int) -> None:
        """Kills a task."""
        self.tasks[job, index].kill()
        self.tasks[job, index].wait()


def make_function(tf: Any, strategy: Any, case: str, ps: int) -> Any:
    if case in ("noop", "latency"):
        return tf.function(lambda: tf.constant(0))
    with strategy.scope():
        if case == "many":
            variables = [tf.Variable(tf.zeros([10_000])) for _ in range(200)]
        elif case.startswith("rows"):
            variables = [tf.Variable(tf.zeros([MEGA // ps, 64])) for _ in range(ps)]
        else:
            size = int("".join(c for c in case if c.isdigit()) or 1) * MEGA
            variables = [tf.Variable(tf.zeros([size // ps])) for _ in range(ps)]
        optimizer: Any = None
        if "sgd" in case:
            import keras

            optimizer = keras.optimizers.SGD(1e-3 if case == "rows_sgd" else 1e-6)
            optimizer.build(variables)
    drawn, limit = 4096 // ps, MEGA // ps
    fixed = tf.random.stateless_uniform([drawn], (0, 0), 0, limit, tf.int64)

    def subtract() -> None:
        for v in variables:
            v.assign_sub(v.read_value() * 1e-6)

    def apply() -> None:
        strategy.run(lambda: optimizer.apply_gradients([(v * 1e-6, v) for v in variables]))

    def rows() -> None:
        numbers = fixed if case == "rows_fixed" else tf.random.uniform([drawn], 0, limit, tf.int64)
        for table in variables:
            table.scatter_sub(tf.IndexedSlices(tf.gather(table, numbers) * 1e-3 + 1e-3, numbers))

    def rows_sgd() -> None:
        numbers = tf.random.uniform([drawn], 0, limit, tf.int64)

        def replica() -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.square(tf.gather(table, numbers) + 1.0)) for table in variables])
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        strategy.run(replica)

    if case == "rows_sgd":
        return tf.function(rows_sgd)
    return tf.function(rows if case.startswith("rows") else apply if optimizer is not None else subtract)


def worker_kill(tf: Any, strategy: Any, coordinator: Any, cluster: Cluster) -> dict[str, Any]:
    with strategy.scope():
        value, count = tf.Variable(tf.zeros([MEGA])), tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step() -> None:
        value.assign_sub(value.read_value() * 1e-6)
        count.assign_add(1)

    for _ in range(20):
        coordinator.schedule(step)
    coordinator.join()
    begin_count = int(count.numpy())

    def run() -> None:
        for _ in range(1500):
            coordinator.schedule(step)
        coordinator.join()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.3)
    cluster.kill("worker", 0)
    killed = last_change = time.perf_counter()
    last, longest, restarted = int(count.numpy()), 0.0, False
    while thread.is_alive() and time.perf_counter() - killed < 90:
        now, seen = time.perf_counter(), int(count.numpy())
        if seen != last:
            longest, last, last_change = max(longest, now - last_change), seen, now
        if not restarted and now - killed > 3:
            cluster.start("worker", 0)
            restarted = True
        time.sleep(0.005)
    applied = int(count.numpy()) - begin_count
    return {"longest_gap_s": longest, "steps_applied": applied, "steps_scheduled": 1500}


def measure(tf: Any, strategy: Any, coordinator: Any, cluster: Cluster, case: str, seconds: float) -> dict[str, Any]:
    if case == "kill":
        return worker_kill(tf, strategy, coordinator, cluster)
    fn = make_function(tf, strategy, "dense1M" if case == "server_kill" else case, len(cluster.spec["ps"]))
    if case == "server_kill":
        return seconds_to_error(coordinator, fn, lambda: cluster.kill("ps", 0))
    if case == "latency":
        times = []
        for _ in range(420):
            begin = time.perf_counter()
            coordinator.schedule(fn).fetch()
            times.append(1e6 * (time.perf_counter() - begin))
        times = sorted(times[20:])
        return {"p50_us": times[200], "p99_us": times[396]}
    rate = throughput(coordinator, fn, len(cluster.spec["worker"]), seconds)
    result = {"per_s": rate}
    if case.endswith("M"):
        result["GB_per_s"] = rate * 8 * int("".join(c for c in case if c.isdigit())) * MEGA / 1e9
    if case.startswith("rows"):
        result["rows_per_s"] = rate * 4096
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--cases", default="noop,latency,dense1M")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--task", nargs=2)
    parser.add_argument("--spec")
    options = parser.parse_args()
    if options.task:
        serve(options.task[0], int(options.task[1]), json.loads(options.spec))
        return
    cluster = Cluster(options.workers, options.ps)
    results: dict[str, Any] = {}
    try:
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.spec), rpc_layer="grpc", task_type="chief", task_id=0
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        for case in options.cases.split(","):
            results[case] = measure(tf, strategy, coordinator, cluster, case, options.seconds)
    finally:
        for task in cluster.tasks.values():
            task.kill()
        print(json.dumps(results), flush=True)
        os._exit(0)  # TensorFlow's threads wait for tasks that are gone


if __name__ == "__main__":
    main()
