"""A service with fake drivers, as a process that can be killed.

python service_process.py SETTINGS_AS_JSON
"""

from __future__ import annotations

import asyncio
import sys

from rlhfless.control.drivers import LocalDrivers
from rlhfless.control.serve import serve
from rlhfless.control.settings import ServiceSettings

if __name__ == "__main__":
    settings = ServiceSettings.model_validate_json(sys.argv[1])
    asyncio.run(serve(settings, lambda _: None, LocalDrivers("fakes.fake_driver")))
