"""What Prometheus is told of posts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class PostMetrics:
    """All targets of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._posts = Counter(
            "tickwheel_gateway_posts", "Posts, by target and kind of answer (none: no answer).", ["target", "answer"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "tickwheel_gateway_post_seconds", "How long posts took.", ["target"], registry=registry, buckets=BUCKETS_S
        )
        self._open = Gauge(
            "tickwheel_gateway_target_down", "1 while posts to a target pause, since it failed too often in a row.",
            ["target"], registry=registry,
        )  # fmt: skip

    def of(self, target: str) -> TargetMetrics:
        """Those of one target."""
        self._open.labels(target).set(0)
        return TargetMetrics(self._posts, self._seconds, self._open, target)


class TargetMetrics:
    """One target's."""

    def __init__(self, posts: Counter, seconds: Histogram, is_open: Gauge, target: str) -> None:
        self._posts, self._seconds, self._open, self._target = posts, seconds, is_open, target

    def note(self, answer: str, seconds: float) -> None:
        """Count a post."""
        self._posts.labels(self._target, answer).inc()
        self._seconds.labels(self._target).observe(seconds)

    def set_open(self, is_open: bool) -> None:
        """Whether posts pause."""
        self._open.labels(self._target).set(is_open)
