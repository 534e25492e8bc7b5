"""Chaos with real processes: nodes, load, faults, and a verdict that believes none of them. See docs/CHAOS.md."""
