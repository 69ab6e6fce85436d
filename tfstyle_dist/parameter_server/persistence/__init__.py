"""What a parameter server writes down, and how it comes back from that."""
