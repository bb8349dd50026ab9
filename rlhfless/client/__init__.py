"""The Python client of the control API.

with rlhfless.Client() as client:
    run = client.create_run(spec)
    for event in client.watch(run.id):
        print(event.message)
"""

from rlhfless.client.clients import AsyncClient, Client
from rlhfless.client.errors import ApiFault, Conflict, Forbidden, Invalid, NotFound, ServiceAway, Unauthorized

__all__ = [
    "ApiFault",
    "AsyncClient",
    "Client",
    "Conflict",
    "Forbidden",
    "Invalid",
    "NotFound",
    "ServiceAway",
    "Unauthorized",
]
