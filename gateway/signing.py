"""Signatures of posts, as Standard Webhooks 1.0 defines them (https://www.standardwebhooks.com).

A secret is `whsec_` and base64. With several secrets a post has a signature by each, so a receiver can change from one
to the next while both hold.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64


def secret_of(text: str) -> bytes:
    """The key of a secret. Raises ValueError with what is allowed."""
    text = text.strip()
    try:
        if not text.startswith(PREFIX):
            raise ValueError
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"a secret is {PREFIX} and base64") from None
    if not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        raise ValueError(f"a secret has {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, not {len(key)}")
    return key


def signature_headers(secrets: Sequence[bytes], message_id: str, now_s: int, body: bytes) -> dict[str, str]:
    """The headers of a signed post; without secrets only id and time."""
    headers = {"webhook-id": message_id, "webhook-timestamp": str(now_s)}
    signed = b".".join((message_id.encode(), str(now_s).encode(), body))
    signatures = [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in secrets]
    if signatures:
        headers["webhook-signature"] = " ".join(f"v1,{signature}" for signature in signatures)
    return headers
