"""The cases of the cluster clock that are played on real nodes: the wrong clocks, and the signs that must show.

Owns the scripts and their names. Each is played under load on a stage of its own; how the run is judged stands in
`clock_run.py`. The same cases are played in simulation by tests/chaos/test_clock_cases.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tickwheel.chaos.live.clock_stage import DISAGREE, JUMP, RIGHT_AGAIN, STOPPED, WARNED, ClockStage

HOUR_MS = 3_600_000
STEP_MS = 600_000
LITTLE_MS = 10_000
DRIFT_PPM = 20_000
HOLDOVER_MS = 8_000
PAUSE_S = 20.0
FLOW_S = 2.0
"""How long the flow of messages is observed in a situation."""
WAIT_S = 3.0
"""How long nothing may come while the clocks do not agree."""
STARTED_S = 40.0
SLEWED_SHARE = 0.1
"""Largest share of a step that is slewed away during a case."""

Play = Callable[[ClockStage], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `wrong_ms`: all clocks from the first start; `config` is laid over that of the nodes."""

    name: str
    what: str
    play: Play
    nodes: int = 3
    wrong_ms: int = 0
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


async def _one_is_an_hour_off(stage: ClockStage, by_ms: int) -> None:
    """As the slave it is; as a master after a handover; and as one that starts with a wrong clock and is made master
    again."""
    wrong = (await stage.slaves())[0]
    skew = await stage.wrong([wrong], by_ms)
    await stage.skew_is_told(wrong, by_ms)
    await stage.flows("a slave is wrong", FLOW_S)
    await stage.hand_over(wrong)
    await stage.serves()
    await stage.flows("it is master", FLOW_S)
    await stage.time_is_right(wrong)
    killed = await stage.kill([wrong])
    await stage.end(killed)
    await stage.state_is("AGREED", within_s=STARTED_S)
    await stage.time_is_right(wrong)
    await stage.hand_over(wrong)
    await stage.flows("it is master, and has started with that clock", FLOW_S)
    await stage.time_is_right(wrong)
    await stage.end(skew)
    await stage.logged(stage.nodes, "info", RIGHT_AGAIN, peer=wrong.node_id)


async def _the_master_steps(stage: ClockStage, by_ms: int) -> None:
    """In full flight: nothing happens but words."""
    master = await stage.master()
    step = await stage.wrong([master], by_ms)
    await stage.flows("the master's clock has stepped", FLOW_S)
    await stage.skew_is_told(master, by_ms)
    await stage.serves()
    await stage.time_is_right(master)
    await stage.end(step)
    await stage.logged(stage.nodes, "info", RIGHT_AGAIN, peer=master.node_id)


async def _an_oscillator_drifts(stage: ClockStage, ppm: int) -> None:
    """A slave's, which becomes master then. The rate is found out; what runs up on its wall clock is warned of."""
    node = (await stage.slaves())[0]
    drift = await stage.drift(node, ppm)
    await stage.flows("a slave drifts", 2 * FLOW_S)
    await stage.hand_over(node)
    await stage.flows("it is master", 2 * FLOW_S)
    low, high = sorted((-0.3 * ppm, -1.3 * ppm))  # as far as it is certain
    await stage.status_is("rate of its time against its oscillator, ppm", node, "clock_rate_ppm", low, high)
    await stage.logged(stage.nodes, "warning", WARNED, peer=node.node_id)
    await stage.time_is_right(node)
    await stage.state_is("AGREED")
    await stage.end(drift)


async def _all_are_wrong_together(stage: ClockStage) -> None:
    """By an hour from the start: that is the time then. A step of all is steered to, and a node that has started with
    the new time goes on from that of the last master when it becomes one, and says so."""
    for node in stage.nodes:
        await stage.time_is_right(node)
        await stage.status_is("its own clock against the cluster's time, ms", node, "clock_offset_ms", -5, 5)
    first = await stage.master()
    step = await stage.wrong(stage.nodes, STEP_MS)
    await stage.flows("all clocks have stepped", FLOW_S)
    await stage.state_is("AGREED")
    least_ms = STEP_MS * (1 - SLEWED_SHARE)
    await stage.status_is("still to be made good, ms", first, "clock_slew_ms", least_ms, STEP_MS)
    await stage.status_is("error, ms", first, "clock_error_ms", least_ms, STEP_MS * 1.01)
    for slave in await stage.slaves():
        killed = await stage.kill([slave])
        await stage.end(killed)
        await stage.state_is("AGREED", [slave], STARTED_S)
    await stage.flows("both slaves have started with the new time", FLOW_S)
    killed = await stage.kill([first])
    second = await stage.master()
    await stage.logged([second], "error", JUMP)
    await stage.metric_is(second, "tickwheel_clock_jumps_refused_total", {}, 1, 0)
    await stage.serves()
    await stage.flows("one of them is master", FLOW_S)
    await stage.status_is("still to be made good, ms", second, "clock_slew_ms", least_ms, STEP_MS)
    await stage.end(killed)
    await stage.end(step)


async def _survivors_disagree(stage: ClockStage) -> None:
    """Holdover; its end, with the alarm, while schedules are accepted; and agreement again."""
    master = await stage.master()
    gone, wrong = await stage.slaves()
    killed = await stage.kill([gone])
    stage.clocks_agree(False)
    skew = await stage.wrong([wrong], HOUR_MS)
    survivors = [master, wrong]
    await stage.state_is("HOLDOVER", survivors)
    await stage.logged(survivors, "warning", DISAGREE)
    await stage.serves()
    await stage.flows("holdover", FLOW_S)
    await stage.state_is("EXPIRED", survivors, HOLDOVER_MS / 1_000 + 2)
    await stage.flows("holdover is over", WAIT_S, delivers=False)
    await stage.serves(reason="clock.holdover_ms_max")
    await stage.logged([master], "error", STOPPED)
    await stage.end(skew)
    await stage.state_is("AGREED", survivors)
    await stage.serves()
    stage.clocks_agree(True)
    await stage.flows("they agree again", FLOW_S)
    await stage.end(killed)


async def _a_cold_start_without_agreement(stage: ClockStage) -> None:
    """All restart with three clocks and three times: schedules are accepted, nothing comes until two agree."""
    killed = await stage.kill(stage.nodes)
    stage.clocks_agree(False)
    _, second, third = stage.cluster.nodes
    ahead = await stage.wrong([second], HOUR_MS)
    await stage.wrong([third], -HOUR_MS)
    await stage.end(killed)
    await stage.state_is("UNAGREED", within_s=STARTED_S)
    master = await stage.master()
    await stage.serves(reason="no majority of the members' clocks has agreed since this node's start")
    await stage.flows("the clocks have never agreed", WAIT_S, delivers=False)
    await stage.logged([master], "error", STOPPED)
    await stage.end(ahead)
    await stage.state_is("AGREED")
    await stage.serves()
    stage.clocks_agree(True)
    await stage.time_is_right(master)
    await stage.skew_is_told(third, -HOUR_MS)
    await stage.flows("two agree", FLOW_S)


async def _a_pause(stage: ClockStage, whom: str) -> None:
    """The node wakes with the right time: nothing is early, and all that waited comes."""
    before = await stage.master()
    node = before if whom == "master" else (await stage.slaves())[0]
    pause = await stage.pause(node)
    await stage.flows(f"the {whom} is paused", PAUSE_S)
    await stage.end(pause)
    await stage.state_is("AGREED")
    await stage.time_is_right(node)
    await stage.flows("it is awake", FLOW_S)


async def _a_cluster_of_one(stage: ClockStage, by_ms: int) -> None:
    """It goes by its own clock: a step is made good at a tenth of a second a second, and shown."""
    node = await stage.master()
    step = await stage.wrong([node], by_ms)
    await stage.flows("its clock has stepped", 2 * FLOW_S)
    low, high = sorted((by_ms * (1 - SLEWED_SHARE), by_ms * 0.98))
    await stage.status_is("still to be made good, ms", node, "clock_slew_ms", low, high)
    most_ms = abs(by_ms) * 1.01
    await stage.status_is("error, ms", node, "clock_error_ms", most_ms * (1 - SLEWED_SHARE) * 0.98, most_ms)
    await stage.logged([node], "warning", WARNED, peer=node.node_id)
    await stage.state_is("AGREED")
    await stage.serves()
    await stage.end(step)


_CASES = (
    Case("hour-ahead", "one of three an hour ahead", partial(_one_is_an_hour_off, by_ms=HOUR_MS)),
    Case("hour-behind", "one of three an hour behind", partial(_one_is_an_hour_off, by_ms=-HOUR_MS)),
    Case("step-ahead", "the master's clock steps 10 minutes ahead", partial(_the_master_steps, by_ms=STEP_MS)),
    Case("step-behind", "the master's clock steps 10 minutes back", partial(_the_master_steps, by_ms=-STEP_MS)),
    Case("drift-fast", "2 % too fast, as slave and as master", partial(_an_oscillator_drifts, ppm=DRIFT_PPM)),
    Case("drift-slow", "2 % too slow, as slave and as master", partial(_an_oscillator_drifts, ppm=-DRIFT_PPM)),
    Case("together", "all wrong together, and a step of all", _all_are_wrong_together, wrong_ms=-HOUR_MS),
    Case(
        "survivors",
        "two survivors that disagree",
        _survivors_disagree,
        config={"clock": {"holdover_ms_max": HOLDOVER_MS}},
    ),
    Case("cold-start", "three clocks, three times at the start", _a_cold_start_without_agreement),
    Case("pause-master", "the master pauses for 20 s", partial(_a_pause, whom="master")),
    Case("pause-slave", "a slave pauses for 20 s", partial(_a_pause, whom="slave")),
    Case("alone-ahead", "a cluster of one, 10 s ahead", partial(_a_cluster_of_one, by_ms=LITTLE_MS), nodes=1),
    Case("alone-behind", "a cluster of one, 10 s back", partial(_a_cluster_of_one, by_ms=-LITTLE_MS), nodes=1),
)
CASES: Mapping[str, Case] = {case.name: case for case in _CASES}
