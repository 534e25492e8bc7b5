"""A whole cluster in one process on simulated time: one seed, one run, the same byte for byte."""
