from __future__ import annotations

import os
import signal
import threading

import pytest

from spiral_fast.interrupts import interrupts_held


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
