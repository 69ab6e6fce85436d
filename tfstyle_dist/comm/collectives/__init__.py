"""Sums and gathers between workers: the route that each takes, and the comparison of calls before it."""
