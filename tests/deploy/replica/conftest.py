"""One uvicorn for all tests, a fresh middleware for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.replica.push_client import Replica, push_of, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Replica]:
    replica = Replica()
    with serving(replica) as replica.port:
        yield replica


@pytest.fixture
def replica(served: Replica, tmp_path: Path) -> Iterator[Replica]:
    served.loras.clear()
    served.push = push_of(tmp_path / "push")
    yield served
    served.push.close()
