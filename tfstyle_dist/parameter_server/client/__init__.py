"""What a process does with tensors on parameter servers: pulls, pushes, variables."""
