"""What the node shows of itself: status, metrics, events, pins."""
