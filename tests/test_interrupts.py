from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from spiral_fast.interrupts import interrupts_held, result_of


def test_ctrl_c_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("after the signal")
        done.append("never")
    assert done == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_inner_block_waits_for_the_outer_one():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held():
            with interrupts_held():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_sigint_is_ignored_it_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_without_ctrl_c_nothing_happens():
    with interrupts_held():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_passes_on_and_the_handler_is_back():
    with pytest.raises(ZeroDivisionError):
        with interrupts_held():
            raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_it_is_a_no_op():
    entered = []

    def work():
        with interrupts_held():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_a_result_is_waited_for_and_an_error_passes_on():
    release = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: release.wait() and 7)
        threading.Timer(0.05, release.set).start()
        assert result_of(waiting) == 7
    failed: Future = Future()
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        result_of(failed)


def test_ctrl_c_ends_the_wait_for_a_result():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        result_of(Future())
