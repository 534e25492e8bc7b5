"""tickwheel: a replicated, highly available scheduler for delayed messages."""
