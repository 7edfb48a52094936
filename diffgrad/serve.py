"""What runs inside a worker process: one framework, one case after another, until the channel closes."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from diffgrad.case import case_from_object
from diffgrad.trace import is_large, pack


def spool_of(log: str, number: int) -> Path:
    """The file for the large arrays of a process's answer ``number``, beside its log."""
    return Path(f"{log}.{number}")


def serve(channel: Any, name: str, log: str) -> None:
    """Load the adapter, announce it, then answer each request with a packed Outcome.

    Args:
        channel: execnet channel; requests are JSON ``{"case": ..., "quick": bool}``.
        name: the adapter's name.
        log: a file that takes everything the framework prints, so that start-up noise stays out of the user's sight
            and a crash leaves its last words.
    """
    _redirect(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the campaign, which ends its workers itself.
    from diffgrad.adapters.registry import load

    try:
        adapters = {False: load(name)}
    except ImportError as e:
        channel.send(msgspec.json.encode({"missing": str(e)}))
        return
    first = adapters[False]
    channel.send(msgspec.json.encode({"pid": os.getpid(), "versions": first.versions(), "devices": first.devices()}))
    spent = time.process_time()
    for number, request in enumerate(channel):
        asked = msgspec.json.decode(request)
        quick = bool(asked["quick"])
        if quick not in adapters:
            adapters[quick] = load(name, quick)
        outcome = adapters[quick].run(case_from_object(asked["case"]))
        now = time.process_time()
        channel.send(pack(msgspec.structs.replace(outcome, total_cpu_s=now - spent), spool_of(log, number)))
        if is_large(outcome.trace):
            # A net's trace takes hundreds of megabytes, and the next request may be long in coming.
            del outcome
            gc.collect()
            _hand_back_memory()
        spent = now


def _hand_back_memory() -> None:
    """Give freed memory back to the system, where the C library knows how to."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _redirect(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stderr.flush()
    os.dup2(fd, 2)
    faulthandler.enable(2)
