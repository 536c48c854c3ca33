"""The daemon of tests/proxy, and a browser to look at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.page.chromium import CHROMIUM, Chromium
from tests.proxy.conftest import start

__all__ = ["browser", "start"]


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Chromium]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    async with Chromium(tmp_path / "profile") as running:
        yield running
