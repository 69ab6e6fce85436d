"""Who the other workers are, where they run, what they do, and which of them are missing."""
