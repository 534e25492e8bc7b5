"""Commands about the replicated settings, which hold for all nodes: settings get, set."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from tickwheel.node.cli.options import ADDRESS_DEFAULT, Addresses, AsJson
from tickwheel.node.cli.output import ask, duration, print_json, print_table, span_text, use_json
from tickwheel.proto import admin_pb2

settings_app = typer.Typer(no_args_is_help=True, help="Replicated settings: show, change.")


@settings_app.command("get")
def settings_get(address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Show the replicated settings."""
    use_json(as_json)
    _show_settings(ask(address, lambda client: client.admin.settings()), as_json)


@settings_app.command("set")
def settings_set(
    changes: Annotated[
        list[str],
        typer.Argument(help="NAME=VALUE. A time as a duration: retention=7d; retention_ms=604800000 is the same."),
    ],
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Change replicated settings, for all nodes at once."""
    use_json(as_json)
    settings = admin_pb2.Settings()
    for change in changes:
        name, equals, text = change.partition("=")
        known = admin_pb2.Settings.DESCRIPTOR.fields_by_name
        name = {plain_name(found): found for found in known}.get(name, name)
        if not equals or name not in known:
            names = ", ".join(map(plain_name, known))
            raise typer.BadParameter(f"{change}: must be NAME=VALUE, where NAME is one of {names}")
        try:
            setattr(settings, name, _value(name, text))
        except (TypeError, ValueError, typer.BadParameter) as error:
            raise typer.BadParameter(f"{change}: {error}") from None
    _show_settings(ask(address, lambda client: client.admin.update_settings(settings)), as_json)


def is_time(name: str) -> bool:
    """Whether a setting is a time in milliseconds. Its value may be given as a duration."""
    return "ms" in name.split("_")


def plain_name(name: str) -> str:
    """The name without its unit, which may be left out: `retention`, `delay_max`."""
    return "_".join(part for part in name.split("_") if part != "ms")


def _value(name: str, text: str) -> object:
    field = admin_pb2.Settings.DESCRIPTOR.fields_by_name[name]
    if field.type == field.TYPE_STRING:
        return text
    if field.type == field.TYPE_BOOL:
        if text not in {"true", "false"}:
            raise ValueError("true or false")
        return text == "true"
    if is_time(name) and not text.lstrip("-").isdigit():
        return round(duration(text) / timedelta(milliseconds=1))
    return int(text)


def _show_settings(settings: admin_pb2.Settings, as_json: bool) -> None:
    values = {field.name: value for field, value in settings.ListFields()}
    if as_json:
        print_json(values)
    else:
        print_table("", ("setting", "value"), [_shown(name, value) for name, value in values.items()], whole=(0,))


def _shown(name: str, value: object) -> tuple[str, str]:
    if isinstance(value, bool):
        return name, str(value).lower()
    if is_time(name) and isinstance(value, int):
        return plain_name(name), span_text(value)
    return name, str(value)
