"""The replicated state machine: everything that follows from the log and nothing else. Start at `machine.py`."""
