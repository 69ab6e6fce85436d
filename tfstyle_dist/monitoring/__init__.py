"""Layer 3: where the time of a training step goes."""

from tfstyle_dist.monitoring.diagnosis import Finding
from tfstyle_dist.monitoring.monitor import Monitor, StepTimes
from tfstyle_dist.monitoring.report import ReplicaTimes, Report

__all__ = ["Finding", "Monitor", "ReplicaTimes", "Report", "StepTimes"]
