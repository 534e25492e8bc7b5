"""One checker a promise. Each sees the records it needs, as they happen, and raises BrokenPromise.

`ALL` is what a run uses; a checker that never gets a record of its kinds stays silent.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import BrokenPromise, Checker, attach
from tickwheel.chaos.sim.checkers.broadcasts import Broadcasts
from tickwheel.chaos.sim.checkers.cold import ColdOnce
from tickwheel.chaos.sim.checkers.fifo import InOrder
from tickwheel.chaos.sim.checkers.foreign_code import NoForeignCode
from tickwheel.chaos.sim.checkers.loads import LoadsOnce
from tickwheel.chaos.sim.checkers.p1_dead import DeadLetters
from tickwheel.chaos.sim.checkers.p1_durable import Durable
from tickwheel.chaos.sim.checkers.p1_filters import FiltersHold
from tickwheel.chaos.sim.checkers.p1_log import CommittedNeverLost
from tickwheel.chaos.sim.checkers.p1_no_loss import NoLoss
from tickwheel.chaos.sim.checkers.p1_pauses import PausesHold
from tickwheel.chaos.sim.checkers.p1_resets import ResetsHold
from tickwheel.chaos.sim.checkers.p1_retries import RetriesCome
from tickwheel.chaos.sim.checkers.p1_senders import OneContent
from tickwheel.chaos.sim.checkers.p1_settled import SettledHolds
from tickwheel.chaos.sim.checkers.p2_no_invention import NoInvention
from tickwheel.chaos.sim.checkers.p3_never_early import NeverEarly
from tickwheel.chaos.sim.checkers.p4_soon import Soon
from tickwheel.chaos.sim.checkers.p5_duplicates import FewDuplicates
from tickwheel.chaos.sim.checkers.p5_handover import HandedOver
from tickwheel.chaos.sim.checkers.p5_kept import LeasesWritten
from tickwheel.chaos.sim.checkers.p6_monotone import Monotone
from tickwheel.chaos.sim.checkers.p7_one_master import OneMaster
from tickwheel.chaos.sim.checkers.p8_same_state import SameState
from tickwheel.chaos.sim.checkers.p9_definite_cancel import DefiniteCancel
from tickwheel.chaos.sim.checkers.p9_deletions import DeletionsHold
from tickwheel.chaos.sim.checkers.p9_sweeps import SweepsDone
from tickwheel.chaos.sim.checkers.p10_live import Live
from tickwheel.chaos.sim.checkers.p11_bounded import Bounded
from tickwheel.chaos.sim.checkers.p11_in_flight import InFlightBounded
from tickwheel.chaos.sim.checkers.p12_runs import RunsOnce
from tickwheel.chaos.sim.checkers.p13_keys import KeysHeld
from tickwheel.chaos.sim.checkers.staged_writes import WritesOnce

ALL: tuple[type[Checker], ...] = (
    NoLoss,
    Durable,
    CommittedNeverLost,
    RetriesCome,
    SettledHolds,
    DeadLetters,
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
)

__all__ = ["ALL", "BrokenPromise", "Checker", "attach"]
