"""Started in a shell's background, tests inherit an ignored SIGINT and would hand it on to the processes they start."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True)
def ctrl_c_raises():
    signal.signal(signal.SIGINT, signal.default_int_handler)
