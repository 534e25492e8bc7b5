"""The process around NodeCore: loop, ports, gRPC services, life from start to stop."""
