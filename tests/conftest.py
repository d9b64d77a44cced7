"""How the tests are shared out among workers."""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/test_series.py",)  # what they share takes more than a minute to make


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadScopeScheduling":
    """Each test for itself, the files of TOGETHER whole. Groups of pytest-xdist 3.8 are lost under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((file for file in TOGETHER if nodeid.startswith(file)), nodeid)

    return Scheduling(config, log)
