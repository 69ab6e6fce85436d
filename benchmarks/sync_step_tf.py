"""The step of ``sync_step.py`` on TensorFlow, for its multilayer perceptrons; run by it in an interpreter that has it.

python benchmarks/sync_step_tf.py mirrored --model tiny      # 2 logical CPUs in one process
python benchmarks/sync_step_tf.py mwms --model tiny          # 2 processes
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

WIDTHS = {"big": (1024, 4096, 4096), "mid": (256, 1024, 512), "tiny": (64, 32, 32)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch_workers(arguments: list[str]) -> int:
    """Runs this script once for each of two workers; the first one's output is ours."""
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        output = None if index == 0 else subprocess.DEVNULL
        command = [sys.executable, __file__, *arguments, "--child"]
        environment = {**os.environ, "TF_CONFIG": config}
        processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.DEVNULL))
    try:
        return max(process.wait(600) for process in processes)
    finally:
        for process in processes:
            process.kill()


def strategy_of(tf: Any, form: str) -> Any:
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1 if form == "mwms" else 2)
    if form == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return tf.distribute.MultiWorkerMirroredStrategy() if form == "mwms" else tf.distribute.get_strategy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=("one", "mirrored", "mwms"))
    parser.add_argument("--model", choices=WIDTHS, default="big")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if options.form == "mwms" and not options.child:
        sys.exit(launch_workers(sys.argv[1:]))
    import tensorflow as tf

    strategy = strategy_of(tf, options.form)
    a, b, c = WIDTHS[options.model]
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        layers = [tf.keras.layers.Dense(b, "relu"), tf.keras.layers.Dense(c, "relu"), tf.keras.layers.Dense(10)]
        model = tf.keras.Sequential([tf.keras.layers.Input((a,)), *layers])
        optimizer = tf.keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    x = tf.random.normal((options.batch, a))
    y = tf.random.uniform((options.batch,), 0, 10, tf.int32)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loss_fn(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=options.batch * replicas)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    compiled = tf.function(lambda: strategy.run(step, args=(x, y)))
    seconds = []
    for number in range(options.steps + 5):
        begin = time.perf_counter()
        strategy.experimental_local_results(compiled())[0].numpy()
        if number >= 5:
            seconds.append(time.perf_counter() - begin)
    print(json.dumps({"form": options.form, "ms": statistics.median(seconds) * 1e3}), flush=True)


if __name__ == "__main__":
    main()
