"""Our Hypothesis profile is the one in force, also where CI is set and Hypothesis would load its own."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.helpers import python

SHOW = "import tests.conftest; from hypothesis import settings; print(settings.get_current_profile_name())"


@pytest.mark.parametrize("ci", ["", "true"])
def test_our_profile_is_loaded_with_and_without_ci(ci: str) -> None:
    assert python("-c", SHOW, CI=ci).stdout == "diffgrad-ci\n"


def test_the_profile_is_deterministic_and_keeps_nothing() -> None:
    ours = settings.get_profile("diffgrad-ci")
    assert (ours.derandomize, ours.database, ours.deadline) == (True, None, None)
    assert settings.get_profile("diffgrad-dev").derandomize is False
