"""Secrets stay out of records: what a verifier says of a failure may quote a request, a header or the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from posttrain.core.verdict import Verdict

SHORTEST = 8
"""Shorter values are no secrets, and would be found everywhere."""
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|DSN|DATABASE_URL|WEBHOOK", re.IGNORECASE)


def redacted(verdict: Verdict, environment: Mapping[str, str] | None = None) -> Verdict:
    """The verdict with values of secret-sounding environment variables replaced by their names.

    >>> redacted(Verdict.failed("raised", "401 for key sk-123456789"), {"JUDGE_API_KEY": "sk-123456789"}).why
    '401 for key [JUDGE_API_KEY]'
    """
    why = scrubbed(verdict.why, environment)
    return verdict if why == verdict.why else replace(verdict, why=why)


def scrubbed(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A text with values of secret-sounding environment variables replaced by their names.

    >>> scrubbed("401 for key sk-123456789", {"JUDGE_API_KEY": "sk-123456789"})
    '401 for key [JUDGE_API_KEY]'
    """
    if not text:
        return text
    values = os.environ if environment is None else environment
    for name in sorted(values, key=lambda n: -len(values[n])):
        if len(values[name]) >= SHORTEST and _NAMES.search(name):
            text = text.replace(values[name], f"[{name}]")
    return text
