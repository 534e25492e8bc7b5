"""The reason why a node could not be reached, in words that say what to change.

Reads the error texts of the system and of the TLS library. Texts without a known meaning are
shown unchanged. Pure.
"""

from __future__ import annotations

from tickwheel.client.errors import Fault
from tickwheel.transport.channel import NO_ANSWER, NO_CONNECTION
from tickwheel.transport.client import CLOSED, NO_ADDRESS, OTHER_PROTOCOL

_OF_ANY = (
    ("Connection refused", "connection refused: no node listens there"),
    (NO_ADDRESS, "the host name cannot be resolved"),
    ("Network is unreachable", "the network is unreachable"),
    ("No route to host", "there is no route to the host"),
    (NO_ANSWER, "unreachable: no answer to the attempt to connect"),
)
_CLOSED_TLS = (
    "the node closed the connection: it wants a certificate that its ca_file has signed and that is valid now by the "
    "node's clock (cert_file=, --tls-cert)"
)
_OF_TLS = (
    ("WRONG_VERSION_NUMBER", "the node does not use TLS, but this client does (tls=, --tls-ca)"),
    ("ostname mismatch", "the host is not in the node's certificate (server_name=, --tls-name)"),
    ("IP address mismatch", "the host is not in the node's certificate (server_name=, --tls-name)"),
    ("certificate has expired", "the node's certificate has expired, or this machine's clock is ahead"),
    ("certificate is not yet valid", "the node's certificate is not yet valid, or this machine's clock is behind"),
    ("CERTIFICATE_VERIFY_FAILED", "the node's certificate is not accepted"),
    ("ALERT", _CLOSED_TLS),
    (CLOSED, _CLOSED_TLS),
    ("Connection reset", _CLOSED_TLS),
)
_CLOSED_PLAINTEXT = "the node closed the connection: it uses TLS, but this client does not (tls=, --tls-ca)"
_OF_PLAINTEXT = (
    (CLOSED, _CLOSED_PLAINTEXT),
    ("Connection reset", _CLOSED_PLAINTEXT),
    (
        OTHER_PROTOCOL,
        "another protocol is spoken there: TLS, which this client does not use (tls=, --tls-ca), or another's",
    ),
)


def timed_out() -> Fault:
    """The fault of an attempt to connect that got no answer in time."""
    return Fault("UNAVAILABLE", f"{NO_CONNECTION}{NO_ANSWER}")


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
    return text.removeprefix(NO_CONNECTION)


def will_not_pass(fault: Fault) -> bool:
    """Whether to wait cannot help: the two sides disagree about TLS or certificates, or no node listens there."""
    return fault.reason == "UNIMPLEMENTED" or (
        fault.not_sent and any(sign in fault.message for sign, _ in (*_OF_TLS, *_OF_PLAINTEXT))
    )


def _of_library(text: str) -> str:
    """What the TLS library says of a certificate: expired, self signed, ..."""
    return text.rpartition("certificate verify failed: ")[2].partition(" (_ssl.c")[0]
