"""Bulk load, staged jobs and the cold tier."""
