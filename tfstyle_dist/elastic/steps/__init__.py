"""What the replicas of an elastic job do in a step, wherever they run, and what a worker's vote says of its own."""
