"""``ParameterServerStrategy``: what it does in the coordinator's program and on the workers, and what it refuses."""
