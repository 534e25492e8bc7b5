"""Commands about the replicated settings, which hold for all nodes: settings get, set."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Annotated, Any, cast, get_type_hints

import typer

from tickwheel.client import Settings
from tickwheel.client.moments import MILLISECOND, duration_of
from tickwheel.client.settings import SettingChanges
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import as_dict, ask, json_name, print_json, print_table
from tickwheel.node.times import span_text

settings_app = Commands(no_args_is_help=True, help="Replicated settings: show, change.")


@settings_app.command("get")
def settings_get() -> None:
    """Show the replicated settings."""
    _show_settings(ask(lambda client: client.admin.settings()))


@settings_app.command("set")
def settings_set(
    changes: Annotated[
        list[str],
        typer.Argument(help="NAME=VALUE. A time as a duration: retention=7d; retention_ms=604800000 is the same."),
    ],
) -> None:
    """Change replicated settings, for all nodes at once."""
    values: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        name = _LONG.get(name, name)
        if not equals or name not in _TYPES:
            raise typer.BadParameter(f"{change[:100]}: must be NAME=VALUE, where NAME is one of {', '.join(_TYPES)}")
        try:
            values[name] = _value(_TYPES[name], text)
        except ValueError as error:
            raise typer.BadParameter(f"{change[:100]}: {error}") from None
    new = cast(SettingChanges, values)
    _show_settings(ask(lambda client: client.admin.update_settings(**new)))


_TYPES: dict[str, type] = get_type_hints(SettingChanges)


def long_name(name: str) -> str:
    """The name of a setting with its unit, as JSON has it: `retention_ms`, `delay_ms_max`."""
    return json_name(name, _TYPES[name])


_LONG = {long_name(name): name for name in _TYPES}


def _value(kind: type, text: str) -> object:
    if kind is str:
        return text
    if kind is bool:
        if text not in {"true", "false"}:
            raise ValueError("true or false")
        return text == "true"
    if kind is timedelta:
        return timedelta(milliseconds=int(text)) if text.lstrip("-").isdigit() else duration_of(text)
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _show_settings(settings: Settings) -> None:
    """Those that the node has."""
    if Asked.json:
        print_json({name: value for name, value in as_dict(settings).items() if value is not None})
        return
    values = {field.name: getattr(settings, field.name) for field in fields(Settings)}
    print_table(
        "",
        ("setting", "value"),
        [(name, _shown(value)) for name, value in values.items() if value is not None],
        whole=(0,),
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return span_text(value // MILLISECOND) if isinstance(value, timedelta) else str(value)
