"""gRPC over HTTP/2 on the event loop, without threads: the nodes' ports and the calls between nodes."""
