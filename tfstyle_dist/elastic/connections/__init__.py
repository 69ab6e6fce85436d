"""How the workers of an elastic job reach each other, and when one of them counts as lost."""
