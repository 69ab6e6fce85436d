"""Layer 0: enums, errors, deadlines, devices, nests, environment, logging."""
