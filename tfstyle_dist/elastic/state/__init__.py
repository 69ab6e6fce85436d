"""What a worker of an elastic job holds between two steps: described for the others, taken from them, and put back."""
