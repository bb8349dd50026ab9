"""What the service orders a driver to do."""

from __future__ import annotations

from typing import Any

from fakes.standing import RUN
from rlhfless.control.delivery import DriverOrder


def order_of(**changes: Any) -> dict[str, Any]:
    order = DriverOrder(
        run_id="run-1", attempt=1, token="secret", service_file="nowhere", service_url="http://127.0.0.1:9",
        ray_address="auto", one_machine=False, http_hosts=[], spec=RUN,
    )  # fmt: skip
    return order.model_dump() | changes
