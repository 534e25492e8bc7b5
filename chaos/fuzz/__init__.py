"""A fuzzer of real nodes: everything that the wire can carry, from the descriptors of the services."""
