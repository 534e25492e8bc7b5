"""Records and index rows that a node lost, supplied by other members."""
