"""Commands about the replicated settings, which hold for all nodes: settings get, set."""

from __future__ import annotations

from typing import Annotated

import typer

from tickwheel.node.cli.options import ADDRESS_DEFAULT, Addresses, AsJson
from tickwheel.node.cli.output import ask, print_json, print_table, use_json
from tickwheel.proto import admin_pb2

settings_app = typer.Typer(no_args_is_help=True, help="Replicated settings: show, change.")


@settings_app.command("get")
def settings_get(address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Show the replicated settings."""
    use_json(as_json)
    _show_settings(ask(address, lambda client: client.admin.settings()), as_json)


@settings_app.command("set")
def settings_set(
    changes: Annotated[list[str], typer.Argument(help="NAME=VALUE.")],
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Change replicated settings, for all nodes at once."""
    use_json(as_json)
    settings = admin_pb2.Settings()
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in admin_pb2.Settings.DESCRIPTOR.fields_by_name:
            known = ", ".join(admin_pb2.Settings.DESCRIPTOR.fields_by_name)
            raise typer.BadParameter(f"{change}: must be NAME=VALUE, where NAME is one of {known}")
        try:
            setattr(settings, name, _value(name, text))
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(f"{change}: {error}") from None
    _show_settings(ask(address, lambda client: client.admin.update_settings(settings)), as_json)


def _value(name: str, text: str) -> object:
    field = admin_pb2.Settings.DESCRIPTOR.fields_by_name[name]
    if field.type == field.TYPE_STRING:
        return text
    if field.type == field.TYPE_BOOL:
        if text not in {"true", "false"}:
            raise ValueError("true or false")
        return text == "true"
    return int(text)


def _show_settings(settings: admin_pb2.Settings, as_json: bool) -> None:
    values = {field.name: value for field, value in settings.ListFields()}
    if as_json:
        print_json(values)
    else:
        rows = [(name, str(value).lower() if isinstance(value, bool) else value) for name, value in values.items()]
        print_table("", ("setting", "value"), rows)
