"""Layer 3: where the time of a training step goes."""

from tfstyle_dist.monitoring.diagnosis import Finding
from tfstyle_dist.monitoring.monitor import Monitor
from tfstyle_dist.monitoring.report import ReplicaTimes, Report
from tfstyle_dist.monitoring.steps import StepTimes

__all__ = ["Finding", "Monitor", "ReplicaTimes", "Report", "StepTimes"]
