"""Layer 3: variables that live in server processes, and the links to them."""
