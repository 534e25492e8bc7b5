"""Django: orders that are given up unless they are paid in time. One file; a project has its settings elsewhere.

`python django_app.py migrate`, then `python django_app.py worker` beside the web server. TICKWHEEL names the nodes.
"""

import functools
import os
import sys
from datetime import timedelta

import django
from django.conf import settings
from django.db import close_old_connections, connection, models, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.http import require_POST

from tickwheel.client import Client, SyncDelivery, SyncWorker

PAY_WITHIN = timedelta(minutes=30)

if not settings.configured:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "shop.sqlite3")}
    settings.configure(
        ROOT_URLCONF=__name__, DATABASES={"default": database}, SECRET_KEY="example", ALLOWED_HOSTS=["*"]
    )
    django.setup()


class Order(models.Model):
    """An order, and the message that gives it up."""

    state = models.CharField(max_length=20, default="open")
    timeout = models.CharField(max_length=64, default="")

    class Meta:
        app_label = "shop"


@functools.cache
def _client_of(process: int) -> Client:
    return Client(os.environ.get("TICKWHEEL", "127.0.0.1:7700"))


def client() -> Client:
    """The client of this process, made when it is first needed: servers fork, and a forked child needs its own."""
    return _client_of(os.getpid())


def schedule_timeout(order: Order) -> None:
    receipt = client().schedule("order-timeouts", str(order.pk), delay=PAY_WITHIN, key=f"order-{order.pk}")
    Order.objects.filter(pk=order.pk).update(timeout=receipt.id)


@require_POST
def place(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        order = Order.objects.create()
        # Only once the order is there for good. If a crash between the two must not lose it, use an outbox.
        transaction.on_commit(functools.partial(schedule_timeout, order))
    return JsonResponse({"order": order.pk}, status=201)


@require_POST
def pay(request: HttpRequest, number: int) -> HttpResponse:
    order = Order.objects.get(pk=number)
    if client().cancel(order.timeout) != "CANCELLED":  # final: it comes, or it never does
        return JsonResponse({"error": "the order has been given up, or is being so"}, status=409)
    Order.objects.filter(pk=number).update(state="paid")
    return JsonResponse({"order": number})


urlpatterns = [path("orders", place), path("orders/<int:number>/payment", pay)]


def give_up(delivery: SyncDelivery) -> None:
    """The handler, in a thread of the worker. A repeat changes nothing."""
    close_old_connections()
    try:
        Order.objects.filter(pk=int(delivery.payload), state="open").update(state="given up")
    finally:
        connection.close()


def worker() -> SyncWorker:
    return SyncWorker(client(), "orders", {"order-timeouts": give_up}, concurrency=4)


def migrate() -> None:
    """In a project: `manage.py migrate`."""
    with connection.schema_editor() as editor:
        editor.create_model(Order)


if __name__ == "__main__":
    {"migrate": migrate, "worker": lambda: worker().run()}[sys.argv[1]]()
