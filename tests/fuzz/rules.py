"""What a campaign's findings mean for a test: nothing, an expected failure, or a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from diffgrad.corpus import Corpus, Entry
from diffgrad.how import How
from diffgrad.judge import judge
from diffgrad.worker import Runner


class Ruling(NamedTuple):
    """``fail`` and ``xfail`` are the reasons for the one or the other; both empty means that all is well."""

    fail: str = ""
    xfail: str = ""


def rule(new: Sequence[Entry], corpus: Corpus, reference: Runner) -> Ruling:
    """A framework's new findings: our own fault if the same-precision reference shows one on the same case, too.

    Such an entry is taken back out of the corpus, where it would count as a known fault of the framework.
    """
    own, theirs = [], []
    for entry in new:
        file = corpus.folder / f"{entry.id}.json"
        # The reference has plain conditions only.
        (answer,) = reference.run([replace(entry.case, how=How())], ["numpy"])
        ours = judge(answer)
        if entry.signature.adapter == "numpy" or ours.signature is not None:
            own.append(f"{entry.case.to_json().decode()}: {entry.sentence} (numpy: {ours.sentence or ours.verdict})")
            file.unlink(missing_ok=True)
            corpus.write_index()
        else:
            theirs.append(f"{entry.sentence} ({file})")
    return Ruling("; ".join(own), "; ".join(theirs))
