"""Keeps secrets out of records. A verifier's message about a failure may quote a request,
a header or the environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from urllib.parse import quote, quote_plus

from posttrain.core.verdict import Verdict

SHORTEST = 8
"""Shorter values do not count as secrets, because they would be found in many texts."""
PART = 12
"""Length from which the beginning of a secret is replaced. Fewer characters could be those of any URL."""
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|DSN|DATABASE_URL|WEBHOOK", re.IGNORECASE)


def redacted(verdict: Verdict, environment: Mapping[str, str] | None = None) -> Verdict:
    """The verdict with values of secret-sounding environment variables replaced by their names.

    >>> redacted(Verdict.failed("raised", "401 for key sk-123456789"), {"JUDGE_API_KEY": "sk-123456789"}).why
    '401 for key [JUDGE_API_KEY]'
    """
    why, kind = scrubbed(verdict.why, environment), scrubbed(verdict.kind, environment)
    return verdict if (why, kind) == (verdict.why, verdict.kind) else replace(verdict, why=why, kind=kind)


def scrubbed(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A text with values of secret-sounding environment variables replaced by their names: whole, as in a URL or in
    JSON, and cut off behind their first half (messages are shortened).

    >>> scrubbed("401 for key sk-123456789", {"JUDGE_API_KEY": "sk-123456789"})
    '401 for key [JUDGE_API_KEY]'
    >>> scrubbed("401 for key sk-1234567890123...", {"JUDGE_API_KEY": "sk-1234567890123456789"})
    '401 for key [JUDGE_API_KEY]...'
    """
    if not text:
        return text
    values = os.environ if environment is None else environment
    secrets = [(n, v) for n, v in values.items() if len(v) >= SHORTEST and _NAMES.search(n)]
    known = [
        (name, form)
        for name, value in sorted(secrets, key=lambda s: -len(s[1]))
        for form in dict.fromkeys((value, quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1]))
    ]
    for name, form in known:
        text = text.replace(form, f"[{name}]")
    for name, form in known:
        text = _without(text, form, f"[{name}]")
    return text


def scrubbed_data(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Plain data with every text in it `scrubbed`, names of entries too."""
    if isinstance(value, str):
        return scrubbed(value, environment)
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        return {scrubbed_data(k, environment): scrubbed_data(v, environment) for k, v in entries}
    if type(value) in (list, tuple):
        return type(value)(scrubbed_data(v, environment) for v in cast("Sequence[Any]", value))
    return value


def _without(text: str, secret: str, name: str) -> str:
    """The text with what begins like the secret, for at least its first half, replaced."""
    least = min(len(secret), max(PART, (len(secret) + 1) // 2))
    at = text.find(secret[:least])
    while at >= 0:
        end = at + least
        while end < len(text) and end - at < len(secret) and text[end] == secret[end - at]:
            end += 1
        text = text[:at] + name + text[end:]
        at = text.find(secret[:least], at + len(name))
    return text
