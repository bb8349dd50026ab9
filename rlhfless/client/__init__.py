"""The Python client of the control API.

    import rlhfless

    with rlhfless.Client() as client:  # or Client("http://there:8080", key="...")
        run = client.create_run(spec)
        for event in client.watch(run.id):
            print(event.message)

The URL defaults to RLHFLESS_URL, then to the service of ./rlhfless-data, then to http://127.0.0.1:8080; the key
defaults to RLHFLESS_API_KEY.
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
