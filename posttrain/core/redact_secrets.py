"""Keeps secrets out of records: a message about a failure may quote a request, a header or the environment."""

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
# Finds `OPENAI_API_KEY`, `HF_TOKEN`, `DB_PASSWORD`, `SENTRY_DSN`, in small letters too.
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
    known = OWN.forms() if environment is None else forms_of(environment)
    # First all whole secrets are replaced, then cut-off ones. Else the cut-off form
    # of one secret could replace the beginning of another that is there in full.
    for name, form in known:
        text = text.replace(form, f"[{name}]")
    for name, form in known:
        text = _without(text, form, f"[{name}]")
    return text


def forms_of(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """(name, text) of each secret in each form that it may have in a message, the longest first."""
    secrets = [(n, v) for n, v in environment.items() if len(v) >= SHORTEST and _NAMES.search(n)]
    return tuple(
        (name, form)
        # The longest first: where one secret contains another, the longer one is replaced whole.
        for name, value in sorted(secrets, key=lambda s: -len(s[1]))
        # The secret as it stands, in a URL's path, in a form, in a JSON string; equal forms once.
        for form in dict.fromkeys(
            # A variable may hold bytes that are no text.
            (value, *(q(value, "", None, "surrogateescape") for q in (quote, quote_plus)), json.dumps(value)[1:-1])
        )
    )


class OwnSecrets:
    """The secrets of this process, looked for again whenever its environment has changed.

    A step scrubs hundreds of texts. Decoding all variables for each text takes more time than judging the answers.
    """

    def __init__(self) -> None:
        self._known: tuple[dict[Any, Any], tuple[tuple[str, str], ...]] | None = None

    def forms(self) -> tuple[tuple[str, str], ...]:
        """See `forms_of`."""
        # `_data` is private to CPython: a dictionary of undecoded variables, which is quick to compare.
        # Where it is something else, secrets are looked for at every call.
        now = getattr(os.environ, "_data", None)
        if type(now) is not dict:
            return forms_of(os.environ)
        if self._known is None or self._known[0] != now:
            # A copy, because `os.environ` changes the same dictionary in place: it would always equal itself.
            before = cast("dict[Any, Any]", now).copy()
            self._known = before, forms_of(os.environ)
        return self._known[1]


OWN = OwnSecrets()


def scrubbed_data(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Plain data with every text in it `scrubbed`, keys of dictionaries too."""
    if isinstance(value, str):
        return scrubbed(value, environment)
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        return {scrubbed_data(k, environment): scrubbed_data(v, environment) for k, v in entries}
    if type(value) in (list, tuple):
        return type(value)(scrubbed_data(v, environment) for v in cast("Sequence[Any]", value))
    return value


def _without(text: str, secret: str, name: str) -> str:
    """The text with every beginning of the secret replaced that has at least half of its characters."""
    # Half of a secret counts as a leak. At least PART characters must agree, because fewer stand in
    # many texts. A secret shorter than PART is replaced only whole.
    least = min(len(secret), max(PART, (len(secret) + 1) // 2))
    at = text.find(secret[:least])
    while at >= 0:
        end = at + least
        # The replaced part ends where the text differs from the secret: a message may be cut anywhere.
        while end < len(text) and end - at < len(secret) and text[end] == secret[end - at]:
            end += 1
        text = text[:at] + name + text[end:]
        at = text.find(secret[:least], at + len(name))
    return text
