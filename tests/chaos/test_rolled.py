"""The count of commands that a run came to: each once, and those beside a change of master."""

from __future__ import annotations

from tickwheel.chaos.sim.rolled import Rolled, all_names, names_of
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import SimulationConfig
from tickwheel.chaos.sim.world import MS
from tickwheel.proto.access_pb2 import AccessCommand
from tickwheel.proto.admin_pb2 import Settings
from tickwheel.proto.log_pb2 import (
    SETTLE_ACK,
    SETTLE_DEAD,
    AdminCommand,
    Cancel,
    Command,
    Lead,
    LogEntry,
    Publish,
    Settle,
    SettleColumns,
    SweepCommand,
)
from tickwheel.proto.scheduler_pb2 import Sweep

LEAD = Command(lead=Lead(term=2))
CANCEL, PUBLISH = Command(cancel=Cancel()), Command(publish=Publish())


def test_names() -> None:
    """Kinds are told apart down to the settings and the outcomes of settlements."""
    commands = [
        CANCEL,
        Command(settle=Settle(batches=[SettleColumns(kind=SETTLE_ACK), SettleColumns(kind=SETTLE_DEAD)])),
        Command(admin=AdminCommand(settings=Settings(pending_max=0, topic_quotas=""))),
        Command(admin=AdminCommand(access=AccessCommand(delete_user="ann"))),
        Command(sweep=SweepCommand(begin=Sweep(delete_group="g"))),
        Command(sweep=SweepCommand(stop="job")),
    ]
    names = [name for command in commands for name in names_of(command)]
    assert names == [
        *("cancel", "settle SETTLE_ACK", "settle SETTLE_DEAD"),
        *("admin settings topic_quotas", "admin settings pending_max"),
        *("admin access delete_user", "sweep begin delete_group", "sweep stop"),
    ]
    assert set(names) <= set(all_names())


def test_beside_a_change_of_master() -> None:
    """A command counts once, and beside a change within a second before or after it; the first election is none."""
    rolled = Rolled()
    times = (
        (0, LEAD),
        (500, CANCEL),
        (3_000, PUBLISH),
        (4_500, CANCEL),
        (5_000, LEAD),
        (5_900, PUBLISH),
        (7_000, CANCEL),
    )
    for index, (at_ms, command) in enumerate(times, 1):
        for _ in range(3):  # as many nodes
            rolled.applied(index, LogEntry(commands=[command]), at_ms * MS)
    assert rolled.times == {"lead": 2, "cancel": 3, "publish": 2}
    assert rolled.beside == {"lead": 1, "cancel": 1, "publish": 1}


def test_a_run_counts_its_commands() -> None:
    """Of every name that is known."""
    commands = simulate(0, SimulationConfig(seconds=1, nodes=3, faults=())).commands
    assert commands["publish"][0] > 1 and commands["lead"] == (1, 0)
    assert set(commands) <= set(all_names())
