"""The words of `posttrain eval` that ask for searches: `search=beam.width=4 search=vote.count=4,8 search.budget=2000`.

It imports neither torch nor numpy, so a wrong word is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from posttrain.config.env import JUDGE, MODEL, Reward
from posttrain.config.values import read
from posttrain.search.search_kinds import KINDS, ONE, SearchKind
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, nearest

KEY = "search"
VERIFIER = "verifier"
"""The value of `search.by` that stands for the environment's own verdict."""
SETTINGS = ("search.by", "search.budget")
"""Settings of all searches of a call."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The searches that were asked for."""

    kinds: tuple[SearchKind, ...]
    """The searches, each once. The first one is a single answer."""
    by: Reward | None = None
    """The reward model or judge that scores. None: the one that the run has."""
    verified: bool = False
    """Whether the environment's own verdict scores whole answers."""
    budget: int = 0
    """Tokens a task. 0: no limit."""
    fault: str | None = None
    """A bug to plant (`posttrain faults`)."""


def asks_search(words: Sequence[str]) -> bool:
    """True where words of the command line ask for searches."""
    return any(_key(w) == KEY or _key(w).startswith(f"{KEY}.") for w in words)


def search_request(words: Sequence[str]) -> tuple[SearchRequest, tuple[str, ...]]:
    """The request for searches that these words make, and the words that are about something else.

    >>> search_request(["search=beam.width=2,4", "seed=1"])[0].kinds[1:]
    (BeamSearch(aggregate='min', width=2, expand=4), BeamSearch(aggregate='min', width=4, expand=4))

    Raises:
        ConfigError: there is no such search or setting, or a value is wrong.
    """
    # A single answer is measured with every request: all gains are compared with it.
    kinds, settings, rest = [ONE], dict[str, str](), list[str]()
    for text in words:
        key, word = _key(text), text.partition("=")[2].strip()
        if key == KEY:
            kinds += kinds_of(word)
        elif key.startswith(f"{KEY}.") or key == "fault":
            if key in settings:
                raise ConfigError(f"{key} is given twice, as {settings[key]!r} and as {word!r}; keep one")
            settings[key] = word
        else:
            rest.append(text)
    if unknown := [k for k in settings if k not in (*SETTINGS, "fault")]:
        name = unknown[0].removeprefix(f"{KEY}.")
        raise ConfigError(
            f"{unknown[0]}: {nearest(unknown[0], SETTINGS)}. What belongs to one search stands behind its name, such as"
            f" search=beam.{name if name in dataclass_json.hints(KINDS['beam']) else 'width'}=4"
        )
    if len(kinds) == 1:
        first_setting = next(iter(settings), "this")
        raise ConfigError(f"{first_setting} is about searches, and none is named: add one, such as search=best_of")
    return (
        SearchRequest(
            # Two words may name the same search, which is measured once.
            kinds=tuple(dict.fromkeys(kinds)),
            by=_by(settings.get("search.by")),
            verified=settings.get("search.by") == VERIFIER,
            budget=_budget(settings.get("search.budget", "0")),
            fault=settings.get("fault"),
        ),
        tuple(rest),
    )


def kinds_of(word: str) -> list[SearchKind]:
    """The searches that one word names: several values of a setting are several searches.

    >>> [k.name for k in kinds_of("best_of.count=4,8,aggregate=mean")]
    ['best_of.count=4,aggregate=mean', 'best_of.count=8,aggregate=mean']
    """
    name, dot, text = word.partition(".")
    if name not in KINDS:
        raise ConfigError(f"search={word}: there is no search {name!r}; {nearest(name, KINDS)}")
    hints, values, last_key = dataclass_json.hints(KINDS[name]), dict[str, list[str]](), ""
    for part in text.split(",") if dot else ():
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals:
            # A value without a name belongs to the name before it: width=2,4.
            key, value = last_key, part.strip()
        if not key or not value:
            raise ConfigError(f"search={word}: write settings behind the name, such as search={name}.{_example(name)}")
        if key not in hints:
            raise ConfigError(f"search={name}.{key}: {name} has no such setting; {nearest(key, hints)}")
        if equals and key in values:
            raise ConfigError(f"search={word}: {key} is given twice; several values are written {key}=2,4")
        values.setdefault(key, []).append(value)
        last_key = key
    choices = [[read(hints[k], v, f"search={name}.{k}") for v in vs] for k, vs in values.items()]
    return [KINDS[name](**dict(zip(values, chosen, strict=True))) for chosen in product(*choices)]


def _key(text: str) -> str:
    """What stands before the first `=`."""
    return text.partition("=")[0].strip()


def _example(name: str) -> str:
    """A setting of a search with its default, as it is written."""
    first = KINDS[name].shown[0]
    return f"{first}={KINDS[name].__dataclass_fields__[first].default}"


def _by(word: str | None) -> Reward | None:
    """The reward model or judge that a value of `search.by` names; None for the verifier, or without a value."""
    if word is None or word == VERIFIER:
        return None
    if not word.startswith((MODEL, JUDGE)):
        raise ConfigError(
            f"search.by={word}: say what it is: search.by=model:{word or 'PATH'} for a reward model,"
            f" search.by=judge:{word or 'PATH'} for a policy that learned to judge, or search.by={VERIFIER} for the"
            " environment's own verdict"
        )
    return Reward(function=word)


def _budget(word: str) -> int:
    """The value of `search.budget`."""
    budget = read(int, word, "search.budget")
    if budget < 0:
        raise ConfigError(f"search.budget={word}: tokens a task, at least 1; 0 is no limit")
    return budget
