"""The limits a grading process gives itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITS = """
import os, resource, sys
from spiral_fast.rewards.child.limits import limit

hard_memory, hard_seconds = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, (hard_memory, hard_memory))
resource.setrlimit(resource.RLIMIT_CPU, (hard_seconds, hard_seconds))
if os.geteuid() == 0:
    os.setuid(65534)  # root may raise hard limits
limit(512, 30.0)
limit(512, 30.0)
print(*resource.getrlimit(resource.RLIMIT_AS), *resource.getrlimit(resource.RLIMIT_CPU))
"""


def limits_under(hard_memory: int, hard_seconds: int) -> list[int]:
    """Soft and hard limit on memory, soft and hard limit on CPU seconds."""
    command = [sys.executable, "-c", LIMITS, str(hard_memory), str(hard_seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_hard_limits_are_kept_without_root():
    memory, seconds = 2**40, 10**6
    soft_memory, hard_memory, soft_seconds, hard_seconds = limits_under(memory, seconds)
    assert (hard_memory, hard_seconds) == (memory, seconds)
    assert 512 * 2**20 < soft_memory < memory and 32 <= soft_seconds < 300


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_lower_hard_limits_win():
    memory, seconds = 500 * 2**20, 20
    assert limits_under(memory, seconds) == [memory, memory, seconds, seconds]


PROCESSES = """
import os, resource
from spiral_fast.rewards.child.limits import MORE_TASKS, limit_processes

os.setuid(65534) if os.geteuid() == 0 else None  # root has no limit
limit_processes()
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
print(soft, hard, MORE_TASKS)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are counted on Linux only")
def test_a_bound_on_new_processes_above_those_there_are():
    done = subprocess.run([sys.executable, "-c", PROCESSES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    soft, hard, more = map(int, done.stdout.split())
    assert soft == hard or more < soft < more + 100_000
