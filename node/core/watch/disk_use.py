"""Use of a node's data directory: bytes by part, by hour, and by topic for some hours. Any node answers for itself.

Files are measured and indexes read in a worker.
"""

from __future__ import annotations

from tickwheel.node.core.checkpoint import STATE_DIRECTORY, WHEEL_DIRECTORY
from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.metas import ANSWER_BYTES_MAX, FIELD_BYTES, fitting
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.work import read
from tickwheel.proto import admin_pb2
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.wheel.queries import UsageJob

HOURS = f"{WHEEL_DIRECTORY}/hours"


def measure(disk: Disk, path: str = "") -> dict[str, int]:
    """Bytes of each file below a directory. Files removed meanwhile do not count."""
    try:
        names = disk.list(path)
    except DiskError:
        return {path: _size(disk, path)}  # it is a file
    found: dict[str, int] = {}
    for name in names:
        found.update(measure(disk, f"{path}/{name}" if path else name))
    return found


def _size(disk: Disk, path: str) -> int:
    try:
        return disk.size(path)
    except DiskError:
        return 0  # removed since it was listed


def describe(files: dict[str, int]) -> admin_pb2.DiskUse:
    """The answer without topics. A part is the first two names of a path below state and wheel, else the first name."""
    parts: dict[str, int] = {}
    hours: dict[int, int] = {}
    for path, size in files.items():
        names = path.split("/")
        deep = names[0] in (STATE_DIRECTORY, WHEEL_DIRECTORY) and len(names) > 2
        part = "/".join(names[: 2 if deep else 1])
        parts[part] = parts.get(part, 0) + size
        if part == HOURS and names[2].isdecimal():
            hours[int(names[2])] = hours.get(int(names[2]), 0) + size
    use = admin_pb2.DiskUse()
    for part, size in sorted(parts.items()):
        use.parts.add(name=part, bytes=size)
    measured = [admin_pb2.DiskUse.Hour(hour=hour, bytes=size) for hour, size in sorted(hours.items())]
    use.hours.extend(fitting(measured, admin_pb2.DiskUse.Hour.ByteSize))
    use.hours_left_out = len(hours) - len(use.hours)
    return use


async def disk_use(core: Kernel, room: DiskRoom, request: admin_pb2.GetDiskUseRequest) -> admin_pb2.DiskUse:
    """Bytes of this node's data directory by part, and by hour and topic if the request asks for them."""
    disk = core.disk
    room.look()
    last = request.hour_max or (1 << 32) - 1
    holdings = core.wheel.holdings
    wanted = holdings.hours.used(request.hour_min, last + 1).tolist() if request.by_topic else []
    job = UsageJob([holdings.open_hour(hour) for hour in wanted])

    def work() -> admin_pb2.DiskUse:
        use = describe(measure(disk))
        job.run()
        return use

    measured: Promise[admin_pb2.DiskUse] = Promise()
    core.background.submit(work, measured.answered)
    use = await read(measured, "the data directory")
    use.node_id = core.identity.node_id
    use.bytes_total, use.bytes_free = room.total_bytes, room.free_bytes
    use.high_water_percent, use.above_high_water = room.high_percent, room.above
    add_topics(core, use, job)
    return use


def add_topics(core: Kernel, use: admin_pb2.DiskUse, job: UsageJob) -> None:
    """Add the job's bytes by topic name, without deleted topics: the largest ones, as many as fit an answer."""
    left = ANSWER_BYTES_MAX - use.ByteSize()
    for number, (topic_id, (messages, size)) in enumerate(sorted(job.topics.items(), key=lambda item: -item[1][1])):
        topic = admin_pb2.DiskUse.Topic(topic=core.state.topic_name(topic_id), messages=messages, bytes=size)
        left -= topic.ByteSize() + FIELD_BYTES
        if left < 0:
            use.topics_left_out = len(job.topics) - number
            break
        use.topics.append(topic)
    if job.next_hour is not None:
        use.next_hour = job.next_hour
