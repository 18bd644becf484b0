"""`python -m spiral_fast.rollout.sglang.launch FLAGS`: an SGLang server that does not outlive the process that started
it, with its API key out of sight of other users.

Environment: KEY_VARIABLE, and PARENT_VARIABLE (the process that must live).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from spiral_fast.rollout.sglang.names import KEY_VARIABLE, PARENT_VARIABLE

PR_SET_PDEATHSIG = 1  # prctl of Linux; SGLang's own processes do the same with this one


def main() -> None:
    die_with(int(os.environ.pop(PARENT_VARIABLE)))
    flags, key = sys.argv[1:], os.environ.pop(KEY_VARIABLE, None)
    if key:
        flags += ["--api-key", key]
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(flags))


def die_with(parent: int) -> None:
    """Be killed as soon as the thread ends that started this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        sys.exit(f"process {parent} is gone")


if __name__ == "__main__":
    main()
