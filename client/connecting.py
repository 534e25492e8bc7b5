"""The reason why a node could not be reached, in words that say what to change.

Reads the error texts of gRPC and the TLS library, which have no codes for this. Texts without a known meaning are
shown unchanged. Pure.
"""

from __future__ import annotations

import re

from tickwheel.client.errors import Fault

_LAST_ERROR = re.compile(r".*last error: \w+: (?:(?:ipv4|ipv6|unix):\S+: )?")

_OF_ANY = (
    ("Connection refused", "connection refused: no node listens there"),
    ("errors resolving", "the host name cannot be resolved"),
    ("DNS resolution failed", "the host name cannot be resolved"),
    ("Network is unreachable", "the network is unreachable"),
    ("No route to host", "there is no route to the host"),
    ("no answer to the attempt", "unreachable: no answer to the attempt to connect"),
)
_OF_TLS = (
    ("WRONG_VERSION_NUMBER", "the node does not use TLS, but this client does (tls=, --tls-ca)"),
    ("Hostname Verification Check failed", "the host is not in the node's certificate (server_name=, --tls-name)"),
    ("CERTIFICATE_VERIFY_FAILED", "the node's certificate is not accepted"),
    ("Socket closed", "the node closed the connection: it wants a certificate that its ca_file has signed"),
    ("Connection reset", "the node closed the connection: it wants a certificate that its ca_file has signed"),
)
_OF_PLAINTEXT = (
    ("Socket closed", "the node closed the connection: it uses TLS, but this client does not (tls=, --tls-ca)"),
    ("Connection reset", "the node closed the connection: it uses TLS, but this client does not (tls=, --tls-ca)"),
)


def timed_out() -> Fault:
    """The fault of an attempt to connect that got no answer in time."""
    return Fault("UNAVAILABLE", "failed to connect to all addresses: no answer to the attempt")


def why_not(fault: Fault, *, tls: bool) -> str:
    """The reason, for the user, why a node could not be asked."""
    if fault.reason == "UNIMPLEMENTED":
        return "this is no client port of a node: another program listens there, or it is the node's port for its peers"
    if not fault.not_sent:
        return "does not answer" if fault.reason == "DEADLINE_EXCEEDED" else f"{fault.reason}: {fault.message}"
    text = fault.message
    for sign, words in (*_OF_ANY, *(_OF_TLS if tls else _OF_PLAINTEXT)):
        if sign in text:
            return f"{words} ({_of_library(text)})" if sign == "CERTIFICATE_VERIFY_FAILED" else words
    return _rest(text)


def will_not_pass(fault: Fault) -> bool:
    """Whether to wait cannot help: the two sides disagree about TLS or certificates, or no node listens there."""
    return fault.reason == "UNIMPLEMENTED" or (
        fault.not_sent and any(sign in fault.message for sign, _ in (*_OF_TLS, *_OF_PLAINTEXT))
    )


def _of_library(text: str) -> str:
    """What the TLS library says of a certificate: expired, self signed, ..."""
    return text.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(")").removesuffix(": OK") or _rest(text)


def _rest(text: str) -> str:
    """gRPC's text without its common beginning."""
    return _LAST_ERROR.sub("", text)
