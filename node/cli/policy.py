"""A retry policy as options of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from tickwheel.client import ExponentialBackoff, RetryPolicy
from tickwheel.client.moments import duration_of
from tickwheel.node.cli.options import MadeBy
from tickwheel.node.cli.output import duration

MAX_DEFAULT = "2h"
FACTOR_DEFAULT = 2.0


def _policy_from(
    initial: Annotated[
        str | None, typer.Option("--retry-initial", help="Exponential backoff: the first pause, such as 500ms or 2s.")
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(
            "--retry-factor",
            show_default=f"{FACTOR_DEFAULT:g}",
            help="Exponential backoff: each further pause is this many times as long.",
        ),
    ] = None,
    longest: Annotated[
        str | None, typer.Option("--retry-max", help=f"Longest pause; {MAX_DEFAULT} by default.")
    ] = None,
    jitter: Annotated[float, typer.Option("--retry-jitter", help="Pauses vary by this share: 0 to 1.")] = 0.0,
    attempts_max: Annotated[
        int,
        typer.Option(
            "--attempts-max", min=0, max=255, help="Deliveries before a dead letter. 0: the cluster's setting."
        ),
    ] = 0,
) -> RetryPolicy:
    """The policy by the options. Raises BadParameter for options that do not fit."""
    if initial is None:
        if longest is not None or jitter or factor is not None:
            raise typer.BadParameter("--retry-max, --retry-factor and --retry-jitter need --retry-initial")
        return RetryPolicy(attempts_max=attempts_max)
    first = duration("--retry-initial", initial)
    maximum = duration("--retry-max", longest) if longest is not None else max(duration_of(MAX_DEFAULT), first)
    factor = FACTOR_DEFAULT if factor is None else factor
    backoff = ExponentialBackoff(initial=first, factor=factor, maximum=maximum, jitter=jitter)
    return RetryPolicy(backoff=backoff, attempts_max=attempts_max)


Policy = Annotated[RetryPolicy, MadeBy(_policy_from)]
