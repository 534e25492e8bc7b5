"""Status, metrics, events and pins of a node."""
