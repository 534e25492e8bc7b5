"""The application `tickwheel pipeline`, and what its commands share: options, the Spark session, the cluster, refusals.

Spark, Arrow and the client are imported by the commands that need them, so that the others start at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.client.errors import RequestRefused

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from tickwheel.pipeline.options import Connection

app = typer.Typer(
    help="Bulk work on Spark: build and load, generate, forecast, audit, archive and replay.", no_args_is_help=True
)

Addresses = Annotated[
    str,
    # The second name is that of version 0.1, accepted for one more version.
    typer.Option("--addresses", "--endpoints", help="Nodes of the cluster, host:port separated by commas."),
]
Master = Annotated[str, typer.Option(help="The Spark master, for instance spark://host:7077.")]
Memory = Annotated[str, typer.Option(help="Heap of Spark's driver, for instance 2g or 512m.")]
CaFile = Annotated[str, typer.Option(help="TLS: authority that signs the nodes' certificates.")]
CertFile = Annotated[str, typer.Option(help="TLS: certificate of this client.")]
AdminCertFile = Annotated[str, typer.Option(help="TLS: certificate of this client, with the admin role.")]
KeyFile = Annotated[str, typer.Option(help="TLS: its key.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which an unreachable cluster is given up.")]
TIMEOUT_S = 15.0
OWN_ERROR = re.compile(r"^tickwheel\.[\w.]+: (.+)$", re.MULTILINE)
"""The last line of a traceback that ends with an error of ours."""
WORKER_ERROR = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""A traceback of Python; its last line says what happened."""


def failed(text: str) -> RequestRefused:
    """The error of a command: the command line prints it and exits with 1."""
    return RequestRefused(text, "PIPELINE")


def failed_in_spark(error: PySparkException, where: str = "") -> RequestRefused:
    """As `failed`, for an error of Spark. If Python code raised it inside Spark, the text is that of its error, not
    Spark's first line, which only announces a traceback. `where` begins the text."""
    text = str(error).strip()
    why = OWN_ERROR.findall(text)[-1:] or WORKER_ERROR.findall(text)[-1:] or text.splitlines()[:1]
    return failed(": ".join([where, *why] if where else why))


@contextmanager
def refusing(*kinds: type[Exception], where: str = "") -> Iterator[None]:
    """Turns errors of these kinds into errors of a command, and errors of Spark too, whose text begins with `where`."""
    from pyspark.errors import PySparkException

    try:
        yield
    except kinds as error:
        raise failed(str(error)) from None
    except PySparkException as error:
        raise failed_in_spark(error, where) from None


@contextmanager
def spark_session(master: str, memory: str, *, quick: bool = False) -> Iterator[SparkSession]:
    """A session, which is stopped at the end unless this process had it before."""
    from pyspark.sql import SparkSession

    from tickwheel.pipeline.session import NoJavaError, SessionConfig, build_session

    ours = SparkSession.getActiveSession() is None
    try:
        session = build_session(SessionConfig(master=master, driver_memory=memory, quick=quick))
    except NoJavaError as error:
        raise failed(str(error)) from None
    try:
        yield session
    finally:
        if ours:
            session.stop()


def source_options(addresses: str, ca_file: str, cert_file: str, key_file: str) -> dict[str, str]:
    """The connection as options of the data source; those that were not given are left out."""
    given = {"addresses": addresses, "ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    return {name: value for name, value in given.items() if value}


def connection_to(
    addresses: str, ca_file: str, cert_file: str, key_file: str, timeout_s: float = TIMEOUT_S
) -> Connection:
    """Checks the options; nothing is dialled yet."""
    from tickwheel.pipeline.options import CONNECTION, OptionError, Options, connection_of

    try:
        return connection_of(Options(source_options(addresses, ca_file, cert_file, key_file), CONNECTION), timeout_s)
    except OptionError as error:
        raise failed(str(error)) from None
