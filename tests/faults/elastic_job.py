"""A worker of test_checkpoint_elastic.py: the example, held at steps that the test chooses."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import elastic

import tfstyle_dist as td


def main() -> int:
    folder = Path(sys.argv[1])
    with td.MirroredStrategy() as strategy:

        def after_step(step: int) -> None:
            about = {"pid": os.getpid(), "workers": strategy.num_replicas_in_sync, "step": step}
            with (folder / f"host{os.environ['HOST']}.log").open("a") as log:
                log.write(json.dumps(about) + "\n")
            end = time.monotonic() + 60
            while step >= int((folder / "limit").read_text()):
                if time.monotonic() > end:
                    raise TimeoutError(f"held at step {step} for too long")
                time.sleep(0.02)

        return elastic.train(strategy, str(folder / "saved"), epochs=3, save_every=3, after_step=after_step)


if __name__ == "__main__":
    raise SystemExit(main())
