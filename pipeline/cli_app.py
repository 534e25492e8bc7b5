"""The application `tickwheel pipeline`, and what its commands share: options, the Spark session, the cluster, refusals.

Spark, Arrow and the client are imported by the commands that need them, so that the others start at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tickwheel.client.errors import RequestRefused
from tickwheel.node.cli.options import MadeBy, MadeCommands
from tickwheel.pipeline.spark_errors import reason_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.client import AsyncClient
    from tickwheel.pipeline.options import Connection

app = MadeCommands(
    help="Bulk work on Spark: build and load, generate, forecast, audit, archive and replay.", no_args_is_help=True
)

TIMEOUT_S = 15.0
QUIET_S_MAX = 2.0
TOKEN_VARIABLE = "TICKWHEEL_TOKEN"
"""The same as for the other commands: no argument, which other users of the machine could see."""
JAVA_ENDED = (
    "Spark's Java process has ended before the work was done: it was killed, by a user or by the system for want of "
    "memory, or it crashed (hs_err_pid*.log). Run the same command again"
)


def failed(text: str) -> RequestRefused:
    """The error of a command: the command line prints it and exits with 1."""
    return RequestRefused(text, "PIPELINE")


@contextmanager
def refusing(*kinds: type[Exception], where: str = "") -> Iterator[None]:
    """Turns errors of these kinds into errors of a command, and errors of Spark too, whose text begins with `where`."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except kinds as error:
        raise failed(str(error)) from None
    except (PySparkException, Py4JJavaError) as error:
        raise failed(reason_of(error, where)) from None


@contextmanager
def interrupted(session: SparkSession) -> Iterator[None]:
    """Ctrl-C ends the work in this context with a KeyboardInterrupt, and so does a SIGTERM, as of a time-out or of who
    stops a service: what is half done is removed. A `build` that a SIGTERM ended at once left a folder that the next
    one refused. Spark's own handler fails to cancel its jobs, and it and Java would show pages of stacks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def quiet() -> None:
        with suppress(Exception):  # Java may have ended
            session.sparkContext.setLogLevel("OFF")

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        # This thread's connection to Java waits for an answer.
        silent = threading.Thread(target=quiet, daemon=True)
        silent.start()
        silent.join(QUIET_S_MAX)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, interrupt)
    logging.getLogger().addFilter(_is_no_echo)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(_is_no_echo)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_no_echo(record: logging.LogRecord) -> bool:
    """py4j logs the KeyboardInterrupt that it raises."""
    return "while sending command" not in record.getMessage()


Master = Annotated[str, typer.Option(help="The Spark master, for instance spark://host:7077.")]


@dataclass(frozen=True)
class SparkOptions:
    """The options of commands that run on Spark."""

    master: Master = "local[*]"
    memory: Annotated[str, typer.Option(help="Heap of Spark's driver, for instance 2g or 512m.")] = "2g"

    @contextmanager
    def session(self, *, quick: bool = False) -> Iterator[SparkSession]:
        """A session, which is stopped at the end unless this process had it before."""
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        from tickwheel.pipeline.session import SAFE_PATH, NoJavaError, SessionConfig, build_session, java_has_ended

        ours = SparkSession.getActiveSession() is None
        try:
            config = SessionConfig(master=self.master, driver_memory=self.memory, quick=quick, settings=SAFE_PATH)
            session = build_session(config)
        except NoJavaError as error:
            raise failed(str(error)) from None
        except PySparkException as error:
            raise failed(reason_of(error, "Spark did not start")) from None
        except Exception as error:
            if java_has_ended(error):
                raise failed(JAVA_ENDED) from None
            raise
        try:
            with interrupted(session):
                yield session
        except Exception as error:
            if java_has_ended(error):
                raise failed(JAVA_ENDED) from None
            raise
        finally:
            if ours and not java_has_ended():
                try:
                    session.stop()
                except Exception as error:
                    if not java_has_ended(error):
                        raise


@dataclass(frozen=True)
class ClusterOptions:
    """The options of commands that ask a cluster."""

    addresses: Annotated[
        str,
        # The second name is that of version 0.1, accepted for one more version.
        typer.Option("--addresses", "--endpoints", help="Nodes of the cluster, host:port separated by commas."),
    ]
    ca_file: Annotated[str, typer.Option(help="TLS: authority that signs the nodes' certificates.")] = ""
    cert_file: Annotated[str, typer.Option(help="TLS: certificate of this client.")] = ""
    key_file: Annotated[str, typer.Option(help="TLS: its key.")] = ""

    def of_source(self) -> dict[str, str]:
        """As options of the data source; those that were not given are left out."""
        names = ("addresses", "ca_file", "cert_file", "key_file")
        given = {name: value for name in names if (value := getattr(self, name))}
        token = os.environ.get(TOKEN_VARIABLE, "")
        return given | {"token": token} if token else given

    def connection(self, timeout_s: float = TIMEOUT_S) -> Connection:
        """Checks the options; nothing is dialled yet. Raises RequestRefused."""
        from tickwheel.pipeline.options import CONNECTION, OptionError, Options, connection_of

        try:
            return connection_of(Options(self.of_source(), CONNECTION), timeout_s)
        except OptionError as error:
            raise failed(str(error)) from None

    def reach(self, timeout_s: float = TIMEOUT_S) -> None:
        """Ask for the master, before Spark takes its time to start. Raises RequestRefused, ClusterUnavailable and other
        errors of a call."""
        with self.connection(timeout_s).open() as client:
            client.admin.master_status()


@dataclass(frozen=True)
class LoadOptions(ClusterOptions):
    """The options of commands that load."""

    cert_file: Annotated[str, typer.Option(help="TLS: certificate of this client, with the admin role.")] = ""
    timeout_s: Annotated[float, typer.Option(help="Seconds after which an unreachable cluster is given up.")] = (
        TIMEOUT_S
    )

    def clients(self) -> Callable[[], AsyncClient]:
        """Checks the options; makes a client at each call. Raises RequestRefused."""
        from tickwheel.client import AsyncClient

        connection = self.connection(self.timeout_s)
        return lambda: AsyncClient(
            connection.addresses, tls=connection.tls, token=connection.token, timeout_s=self.timeout_s
        )


OnSpark = Annotated[SparkOptions, MadeBy(SparkOptions)]
OfCluster = Annotated[ClusterOptions, MadeBy(ClusterOptions)]
OfLoad = Annotated[LoadOptions, MadeBy(LoadOptions)]
