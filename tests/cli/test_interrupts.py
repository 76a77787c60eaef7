"""Ctrl-C while llama.cpp computes what cannot be stopped; a long call of OpenSSL is used here."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from patience import PATIENCE

PREAMBLE = """
import hashlib, signal, time
from ggufspec.cli.interrupts import end_at_second_interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)
end_at_second_interrupt()
"""
ONE_LONG_CALL = """
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)
"""
LOADS = """
from ggufspec.cli.interrupts import end_if_delayed
from ggufspec.llama.log import listening

with end_if_delayed(), listening():
""" + ONE_LONG_CALL.replace("\n", "\n    ")
HANDLES_THREE = """
for _ in range(3):
    try:
        print("ready", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        pass
"""


@contextmanager
def ready(code: str) -> Iterator[subprocess.Popen[str]]:
    args = [sys.executable, "-c", PREAMBLE + code]
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_interrupt_ends_what_cannot_be_interrupted() -> None:
    with ready(ONE_LONG_CALL) as process:
        assert process.stderr
        time.sleep(0.2)  # until it is in the call
        process.send_signal(signal.SIGINT)
        assert "Ctrl-C again ends at once" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130


def test_one_interrupt_ends_a_load_that_cannot_be_interrupted() -> None:
    with ready(LOADS) as process:
        assert process.stderr
        time.sleep(0.2)  # until it is in the call
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == "\nggufspec: interrupted\n"


def test_interrupts_that_are_handled_do_not_end_the_process() -> None:
    with ready(HANDLES_THREE) as process:
        assert process.stdout
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            process.stdout.readline()
        assert process.wait(PATIENCE) == 0
