"""tickwheel: a replicated, highly available scheduler for delayed messages."""

import os

# gRPC's handlers for fork end every fifth child that is forked while gRPC's threads work, before it can run another
# program: Spark's JVM, for one. They must be off before grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
