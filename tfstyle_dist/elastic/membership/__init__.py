"""Who is a member of an elastic job, and which step is committed: the rules, and what each worker does by them."""
