"""What runs inside a worker process: one framework, one case after another, until the channel closes."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from typing import Any

import msgspec

from diffgrad.case import case_from_object
from diffgrad.trace import pack


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
    channel.send(
        msgspec.json.encode(
            {"pid": os.getpid(), "versions": first.versions(), "devices": first.devices(), "mode": first.mode}
        )
    )
    spent = time.process_time()
    for request in channel:
        asked = msgspec.json.decode(request)
        quick = bool(asked["quick"])
        if quick not in adapters:
            adapters[quick] = load(name, quick)
        outcome = adapters[quick].run(case_from_object(asked["case"]))
        now = time.process_time()
        channel.send(pack(msgspec.structs.replace(outcome, total_cpu_s=now - spent)))
        spent = now


def _redirect(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stderr.flush()
    os.dup2(fd, 2)
    faulthandler.enable(2)
