"""One switch for each guard around pysyncobj. All on, always.

Owns nothing but the switches. A test or the simulation turns one off to show that it is needed; no
configuration file, flag or environment variable reaches them. The numbers are those of the gaps
of pysyncobj 0.3.17 that each guard closes. Gaps 11 (commands cut in pieces), 14 (ticks in the log) and 18
(entries lost beside a dump) have no switch: the code that had them is not used at all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards that are in force."""

    known_entries_stripped: bool = True
    """1, follower: entries that the log has already never truncate what follows them."""
    resets_fenced: bool = True
    """1, master: an answer to a message older than the last rewind moves nothing back."""
    bare_commit_clamped: bool = True
    """2: a message that verifies no entry commits none."""
    answers_fenced: bool = True
    """3: answers of another term, start or connection are dropped."""
    votes_counted_once: bool = True
    """4: one vote a term and voter, members only."""
    higher_term_obeyed: bool = True
    """5: any frame of a higher term ends mastership at once, and a lower one is answered."""
    campaign_asked_first: bool = True
    """6: no new term before a majority has said just now that it would vote."""
    votes_sticky: bool = True
    """6: no vote while a live master was heard within the shortest election timeout."""
    lease_from_sending: bool = True
    """7: the lease counts from when a request was sent, not from when its answer came."""
    durable_before_acknowledged: bool = True
    """8: an entry is acknowledged only once it is on stable storage."""
    dumps_refused: bool = True
    """9, 18: pysyncobj neither writes, sends nor loads a dump; checkpoints are ours."""
    apply_errors_fatal: bool = True
    """10: an exception in apply stops the node instead of coming back every tick."""
    loss_reported_unknown: bool = True
    """12: a proposal that may still commit is never reported as refused."""
    pickle_refused: bool = True
    """13: nothing is pickled or unpickled inside a node."""
    slices_bounded: bool = True
    """15: what is read from the journal at once is bounded."""
    foreign_commands_fatal: bool = True
    """16: membership and version commands of pysyncobj are never obeyed."""
    proposals_local: bool = True
    """17: a command is appended by the master that took it, or by nobody."""
    own_durability_counts: bool = True
    """19: a master commits nothing that is not on its own stable storage."""
    starts_silent: bool = True
    """20: no vote within the shortest election timeout after a start."""
    input_drained_first: bool = True
    """20: what has arrived is read before a timer may fire, above all after a stall."""
    transfer_marked: bool = True
    """21: the vote request of a planned handover is not refused as too early."""
    apply_sliced: bool = True
    """22: applying stops after a slice of time, so that heartbeats go out."""
