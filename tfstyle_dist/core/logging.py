"""The package's logger and "say it once"."""

from __future__ import annotations

import logging
import threading

from tfstyle_dist.core import env

_lock = threading.Lock()
_said: set[str] = set()


def get_logger() -> logging.Logger:
    """The logger ``tfstyle_dist``; its level is ``TFSTYLE_LOG_LEVEL`` unless the program set one."""
    logger = logging.getLogger("tfstyle_dist")
    if logger.level == logging.NOTSET:
        logger.setLevel(env.log_level())
    return logger


def warn_once(key: str, message: str) -> None:
    """Logs ``message`` as a warning the first time ``key`` is seen in this process."""
    with _lock:
        if key in _said:
            return
        _said.add(key)
    get_logger().warning(message)
