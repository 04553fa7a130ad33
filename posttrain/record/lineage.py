"""The lineage record: from the base model through each run to the weights at hand.

    lineage.json    in a run folder and beside exported weights: one link a model, oldest first

Each link has fingerprints of the weights with which it began and ended, and digests of tokenizer and chat template. Two
links that do not fit each other are refused. The digest of a link covers all links before it, so an edited link is
found. Links have no paths of this machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from posttrain.record.certificate import LARGEST, LINEAGE
from posttrain.system import read_untrusted
from posttrain.system.errors import DataError, PosttrainError

SCHEMA = 1
MOST = 256
"""Most links of a record."""
KINDS = {"base": "the base model", "adapter": "the adapter", "run": "run", "export": "the export"}


@dataclass(frozen=True, kw_only=True)
class LineageLink:
    """One model in the line of models. A digest '' means that it is not known."""

    kind: str
    """base, adapter (of somebody else), run, or export."""
    name: str
    """The identity of a run; for other kinds a name for people."""
    weights: str = ""
    """Fingerprint of the weights it ends with."""
    tokenizer: str = ""
    template: str = ""
    dtype: str = ""
    began: str = ""
    """Fingerprint of the weights it began with."""
    base: str = ""
    """Fingerprint of the weights beneath the adapter, for a run that trains one."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The work that was done: stages with algorithms, steps, environments and digests of data."""

    @property
    def words(self) -> str:
        return f"{KINDS[self.kind]} {self.name}"


def chain(links: Sequence[LineageLink]) -> list[dict[str, Any]]:
    """The links as JSON data, each with a digest that covers it and all links before it."""
    out: list[dict[str, Any]] = []
    for link in links:
        # A way through JSON, so that the digest is of the data that a reader will parse.
        data = json.loads(json.dumps(asdict(link), default=str))
        out.append({**data, "digest": _digest(data, out[-1]["digest"] if out else "")})
    return out


def _digest(data: Mapping[str, Any], before: str) -> str:
    """The digest of a link (32 hex digits). `before`: the digest of the link before it."""
    # `before` is a part of the text, so a change in one link changes the digests of all links after it.
    text = before + json.dumps(data, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def links_from(rows: Any, place: str, error: type[PosttrainError] = DataError) -> tuple[LineageLink, ...]:
    """The links that `chain` wrote. `error` where they are damaged or were changed."""
    # The number is checked before anything else, since the file may be a stranger's.
    if not isinstance(rows, list) or len(cast("list[Any]", rows)) > MOST:
        raise error(f"{place} is damaged: it has no list of at most {MOST} links")
    out: list[LineageLink] = []
    before = ""
    for number, row in enumerate(cast("list[Any]", rows)):
        if not isinstance(row, dict):
            raise error(f"{place} is damaged: link {number} is no object")
        data = {str(k): v for k, v in cast("dict[Any, Any]", row).items()}
        before = _checked(data, before, f"{place}, link {number}", error)
        out.append(LineageLink(**{k: v for k, v in data.items() if k != "digest"}))
    return tuple(out)


def _checked(data: Mapping[str, Any], before: str, place: str, error: type[PosttrainError]) -> str:
    """Returns the digest of a link, after checking that the link is as it was written."""
    texts = ("kind", "name", "weights", "tokenizer", "template", "dtype", "began", "base")
    # Exactly these entries, since each becomes a field of the link.
    if {*data} != {*texts, "about", "digest"} or str(data["kind"]) not in KINDS or not isinstance(data["about"], dict):
        raise error(f"{place} is damaged, or of another version of posttrain")
    if not all(isinstance(data[n], str) and len(data[n]) < 1000 for n in texts):
        raise error(f"{place} is damaged: a text is wanted where it has none")
    if data["digest"] != (now := _digest({k: v for k, v in data.items() if k != "digest"}, before)):
        raise error(
            f"{place} ({data['kind']} {data['name']}) is not as it was written: its digest differs. Somebody changed"
            " the record. Take a copy that was not changed"
        )
    return now


def check_links(links: Sequence[LineageLink], error: type[PosttrainError] = DataError) -> None:
    """Checks that each model in the line is what the link before it left.

    Raises:
        error: two links have other tokenizers, other chat templates, or other weights.
    """
    for before, link in pairwise(links):
        _same_text(before, link, "tokenizer", "its token ids mean other text", error)
        _same_text(before, link, "template", "a conversation becomes other tokens", error)
        # One model in two dtypes has two fingerprints, so only equal dtypes are compared.
        comparable = before.weights and link.began and before.dtype == link.dtype
        # The link before must have ended with the weights with which this one began, or with those beneath its adapter.
        if comparable and before.weights not in (link.began, link.base):
            raise error(
                f"{link.words} began with weights {link.began}, and {before.words} ended with {before.weights}: they"
                " are not the same model. Give the weights that the record is about; or take the record away"
                f" ({LINEAGE}), and nothing is known of what was before"
            )


def _same_text(before: LineageLink, link: LineageLink, what: str, means: str, error: type[PosttrainError]) -> None:
    """Raises `error` where two links have another tokenizer or another template (`what`). `means`: what that does."""
    then, now = getattr(before, what), getattr(link, what)
    # '' is not known, and contradicts nothing.
    if then and now and then != now:
        name = "chat template" if what == "template" else what
        raise error(
            f"the {name} changed between {before.words} ({then}) and {link.words} ({now}), so {means} than was learned."
            f" Put the {name} of {before.words} there again"
        )


def read_lineage(folder: Path, error: type[PosttrainError] = DataError) -> tuple[LineageLink, ...]:
    """The links of `lineage.json` in a folder; () where there is none.

    Raises:
        error: it is damaged, was changed, or its links do not fit each other.
    """
    data = lineage_data(folder, error)
    if data is None:
        return ()
    links = links_from(data.get("links"), str(folder / LINEAGE), error)
    check_links(links, error)
    return links


def lineage_data(folder: Path, error: type[PosttrainError]) -> dict[str, Any] | None:
    """The whole of `lineage.json`; None where there is none."""
    path = folder / LINEAGE
    if not path.exists():
        return None
    data = read_untrusted.parse_object(read_untrusted.read_bytes(path, LARGEST, error), str(path), error)
    if data.get("schema") != SCHEMA:
        raise error(f"{path} has schema {str(data.get('schema'))[:20]}; this posttrain reads {SCHEMA}")
    return data
