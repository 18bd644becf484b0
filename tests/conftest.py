"""For all tests: an interrupt works, and no example of hypothesis has a time limit."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None)  # a machine may be busy
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def ctrl_c_raises():
    """Started in a shell's background, tests inherit an ignored SIGINT and would hand it on to their processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
