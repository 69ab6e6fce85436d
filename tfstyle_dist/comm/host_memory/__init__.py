"""The transport of workers that share a host: sums in shared memory."""
