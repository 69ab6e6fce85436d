"""What the objects of a program hold for each replica of a process: found, marked, copied, exchanged with the turn."""
