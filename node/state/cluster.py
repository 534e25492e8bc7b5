"""The replicated state without the wheel, as one plain object that the modules of this folder share."""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.node.state.cold import ColdTier
from tickwheel.node.state.groups import Group, Groups
from tickwheel.node.state.loads import Loads
from tickwheel.node.state.producers import Producers
from tickwheel.node.state.rights import AccessControl
from tickwheel.node.state.schedules import Schedules
from tickwheel.node.state.sequence import Sequence
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.staging import Staging
from tickwheel.node.state.subscription import Backlog
from tickwheel.node.state.sweeps import Sweeps
from tickwheel.node.state.topics import Topic, Topics
from tickwheel.node.state.unique_keys import UniqueKeys
from tickwheel.proto.scheduler_pb2 import Sweep
from tickwheel.replication.log import Member
from tickwheel.storage.disk import Disk


@dataclass(slots=True)
class ClusterState:
    """Changed by apply only. `doomed`: files to remove once no checkpoint names them; it is no part of the state."""

    disk: Disk
    directory: str
    applied_index: int = 0
    applied_term: int = 0
    lead_term: int = 0
    cluster_id: str = ""
    """Empty: the cluster has not been created."""
    settings: Settings = field(default_factory=Settings)
    members: dict[str, Member] = field(default_factory=dict)
    removed_ids: set[str] = field(default_factory=set)
    """Ids of removed members. An id never comes back: a lost disk has forgotten its votes."""
    topics: Topics = field(default_factory=Topics)
    groups: Groups = field(default_factory=Groups)
    backlog: Backlog = field(default_factory=Backlog)
    producers: Producers = field(default_factory=Producers)
    sweeps: Sweeps = field(default_factory=Sweeps)
    loads: Loads = field(default_factory=Loads)
    cold: ColdTier = field(default_factory=ColdTier)
    access: AccessControl = field(default_factory=AccessControl)
    schedules: Schedules = field(default_factory=Schedules)
    unique_keys: UniqueKeys = field(default_factory=UniqueKeys)
    hour_min_kept: int = 0
    unsettled_removed: int = 0
    """Messages removed by retention or a deletion that a group had not settled (once per group), or removed by
    retention in a topic that never had a group; and removed dead letters."""
    marks_replays: bool = False
    """The log has marked replayed dead letters (burial.py)."""
    doomed: list[str] = field(default_factory=list)
    staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self.staging = Staging(self.disk, self.directory)

    def deletion_target(self, job: Sweep) -> Topic | Group | None:
        """The topic or group that a sweep deletes; None: it deletes nothing, or the target is gone."""
        action = job.WhichOneof("action")
        if action == "delete_topic":
            return self.topics.get(job.target_id)
        return self.groups.get(job.target_id) if action == "delete_group" else None

    def sequences(self) -> list[Sequence]:
        """All append-only lists in files."""
        found = [sequence for topic in self.topics for sequence in topic.ready.sequences()]
        return found + [sequence for group in self.groups for sequence in group.dead.sequences()]
