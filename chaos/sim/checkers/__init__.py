"""One checker a promise. Each sees the records it needs, as they happen, and raises BrokenPromise.

`ALL` is what a run uses; a checker that never gets a record of its kinds stays silent.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import BrokenPromise, Checker, attach
from tickwheel.chaos.sim.checkers.bulk import ColdOnce, LoadsOnce, WritesOnce
from tickwheel.chaos.sim.checkers.p1_groups import Broadcasts, FiltersHold, InOrder, PausesHold, ResetsHold
from tickwheel.chaos.sim.checkers.p1_log import CommittedNeverLost, Durable, NoForeignCode
from tickwheel.chaos.sim.checkers.p1_no_loss import (
    DeadLetters,
    NoLoss,
    OneContent,
    RetentionHolds,
    RetriesCome,
    SettledHolds,
)
from tickwheel.chaos.sim.checkers.p2_no_invention import NoInvention
from tickwheel.chaos.sim.checkers.p3_never_early import NeverEarly
from tickwheel.chaos.sim.checkers.p4_soon import Soon
from tickwheel.chaos.sim.checkers.p5_duplicates import FewDuplicates, HandedOver, LeasesWritten
from tickwheel.chaos.sim.checkers.p6_monotone import Monotone
from tickwheel.chaos.sim.checkers.p7_one_master import OneMaster
from tickwheel.chaos.sim.checkers.p8_same_state import SameState
from tickwheel.chaos.sim.checkers.p9_cancels import DefiniteCancel, DeletionsHold, SweepsDone
from tickwheel.chaos.sim.checkers.p10_live import Bounded, Live
from tickwheel.chaos.sim.checkers.p11_in_flight import InFlightBounded
from tickwheel.chaos.sim.checkers.p12_runs import RunsOnce
from tickwheel.chaos.sim.checkers.p13_keys import KeysHeld
from tickwheel.chaos.sim.checkers.ports import AuditKept, PortsAnswer, Remembered

ALL: tuple[type[Checker], ...] = (
    NoLoss,
    Durable,
    CommittedNeverLost,
    RetriesCome,
    SettledHolds,
    DeadLetters,
    RetentionHolds,
    NoInvention,
    NeverEarly,
    Soon,
    FewDuplicates,
    HandedOver,
    LeasesWritten,
    Monotone,
    OneMaster,
    SameState,
    DefiniteCancel,
    Live,
    Bounded,
    InFlightBounded,
    InOrder,
    PausesHold,
    SweepsDone,
    DeletionsHold,
    FiltersHold,
    Broadcasts,
    ResetsHold,
    NoForeignCode,
    WritesOnce,
    LoadsOnce,
    OneContent,
    ColdOnce,
    RunsOnce,
    KeysHeld,
    PortsAnswer,
    AuditKept,
    Remembered,
)

__all__ = ["ALL", "BrokenPromise", "Checker", "attach"]
