"""Programs of the system that tests run and pip cannot bring."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import pytest

CI = "POSTTRAIN_CI"
"""Set in the environment of what `scripts/ci` runs."""


def program(names: Sequence[str], package: str) -> str:
    """The path of the first of these programs that is installed.

    Where there is none the test is skipped with its reason, and under CI it fails: what nobody ran must not pass.

    Args:
        names: what the program is called, by system.
        package: the package of Debian and Ubuntu that has it.
    """
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is not None:
        return found
    why = f"{package} is not installed: apt-get install {package}"
    if os.environ.get(CI):
        pytest.fail(f"{why}. CI does not skip what needs it", pytrace=False)
    pytest.skip(why)
