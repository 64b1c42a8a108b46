"""Which documents form a step, on which replica they are trained, and in which packs."""
