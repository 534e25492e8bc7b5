"""All commands about the cluster in one app: status, transfer, member, topic, group, settings, user, role, whoami,
audit."""

from __future__ import annotations

import typer

from tickwheel.node.cli import control  # noqa: F401  # its commands hang below those of status and topics
from tickwheel.node.cli.access import access_app
from tickwheel.node.cli.members import member_app
from tickwheel.node.cli.settings import settings_app
from tickwheel.node.cli.status import status_app
from tickwheel.node.cli.topics import group_app, topic_app

cluster_app = typer.Typer()
cluster_app.add_typer(status_app)
cluster_app.add_typer(member_app, name="member")
cluster_app.add_typer(topic_app, name="topic")
cluster_app.add_typer(group_app, name="group")
cluster_app.add_typer(settings_app, name="settings")
cluster_app.add_typer(access_app)
