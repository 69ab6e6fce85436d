"""Central storage: one copy of parameters and settings, to which all replicas of a host write alike."""
