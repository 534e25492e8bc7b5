"""A channel that sends a token with every call.

grpcio's own call credentials need TLS, which a cluster on one machine does not have. Its interceptors add cost to each
message of a stream. Metadata costs only its bytes, once a call.
"""

from __future__ import annotations

from typing import Any

import grpc


class _Calls:
    """A method of the channel that adds the metadata to each call."""

    def __init__(self, call: Any, metadata: grpc.aio.Metadata) -> None:
        self._call = call
        self._metadata = metadata

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, metadata=self._metadata, **kwargs)


class BearerChannel:
    """Behaves like the wrapped channel; adds the token to calls."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = grpc.aio.Metadata(("authorization", f"Bearer {token}"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As in grpc.aio.Channel; the same holds for the other three kinds of calls."""
        return _Calls(self._channel.unary_unary(*args, **kwargs), self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Calls(self._channel.unary_stream(*args, **kwargs), self._metadata)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Calls(self._channel.stream_unary(*args, **kwargs), self._metadata)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Calls(self._channel.stream_stream(*args, **kwargs), self._metadata)
