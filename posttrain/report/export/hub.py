"""Put a folder on the Hugging Face hub (or where HF_ENDPOINT points): a private repository unless said otherwise."""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.system.errors import ConfigError, DataError

PREFIX = "hub:"
# "me/my-model" or "my-model"; the hub allows 96 characters for each of the two parts
REPOSITORY = re.compile(r"([\w-][\w.-]{0,95}/)?[\w-][\w.-]{0,95}")
SECONDS = 4.0
"""How long the hub may take to be reached at all, before anything is written."""
ENDPOINT = "https://huggingface.co"


def is_hub(target: str | Path) -> bool:
    """True where an export goes to the hub: `hub:me/my-model`."""
    return str(target).startswith(PREFIX)


def repository_of(target: str | Path) -> str:
    """The name in `hub:me/my-model`. ConfigError where it is not the name of a repository."""
    name = str(target).removeprefix(PREFIX)
    # Two dots or two hyphens are names that the hub refuses or reads as something else.
    if not REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(f"{target}: a repository is named hub:USER/NAME, of letters, digits, - _ and .")
    return name


def ready(target: str | Path) -> None:
    """Find out in a few seconds whether a push can work at all. Raises ConfigError where the name is wrong, there is no
    token, or HF_HUB_OFFLINE is set, and DataError where the hub cannot be reached."""
    # In the order of cost: the name, the settings, and only then the network.
    repository_of(target)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or export to a folder")
    if _token() is None:
        raise ConfigError(
            "no token for the hub: run `hf auth login`, or set HF_TOKEN to a token with write access"
            " (https://huggingface.co/settings/tokens); or export to a folder"
        )
    address = endpoint()
    if why := _unreachable(address):
        raise DataError(f"{address} cannot be reached ({why}): check the network, or export to a folder and push later")


def endpoint() -> str:
    """The address of the hub."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or ENDPOINT


def push(folder: Path, target: str | Path, *, private: bool = True, message: str = "Upload by posttrain") -> str:
    """Upload the folder as one commit, into a repository that is made if there is none. Returns its address.

    Raises:
        DataError: the hub refuses it or cannot be reached; the message says what to change.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    name = repository_of(target)
    api: Any = HfApi(endpoint=endpoint(), token=_token())
    try:
        repository = api.create_repo(name, private=private, exist_ok=True, repo_type="model")
        # The hub may add the user's own name before the repository.
        full_name = str(getattr(repository, "repo_id", name))
        api.upload_folder(folder_path=str(folder), repo_id=full_name, commit_message=message)
    except HfHubHTTPError as error:
        raise DataError(_refused(name, error)) from error
    except Exception as error:  # httpx, urllib3 and the hub's own library raise many kinds
        raise DataError(f"pushing to {name} failed: {type(error).__name__}: {error}") from error
    return f"{endpoint()}/{full_name}"


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def _refused(name: str, error: Any) -> str:
    """What the hub's refusal means and what to do, by its HTTP status."""
    status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
    why = {
        401: "the token is not valid: run `hf auth login` again, or correct HF_TOKEN",
        403: f"the token may not write to {name}: use one with write access, or your own user name",
        404: f"there is no such place as {name}: check the user or organisation",
        413: "a file is too large for the hub",
    }.get(status, str(error).split("\n")[0])
    return f"the hub refused {name} ({status}): {why}"


def _unreachable(address: str) -> str:
    """Returns the reason why no connection to the hub can be made within `SECONDS`; '' where one can.

    Nothing is tried where a proxy is set.
    """
    # Behind a proxy a direct connection fails although a push would work.
    if any(os.environ.get(n) or os.environ.get(n.lower()) for n in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")):
        return ""
    host, port = None, 0
    try:
        parts = urlsplit(address)
        if parts.scheme in ("http", "https"):
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # a port that is no number, or a bracket that is not closed
        pass
    if not host:
        raise ConfigError(f"HF_ENDPOINT={address}: no address of a hub, which begins with https://")
    outcome: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=SECONDS).close()
            outcome.append("")
        except (OSError, UnicodeError) as error:  # UnicodeError: a text that is no host name, such as a..b
            outcome.append(getattr(error, "strerror", None) or str(error))

    thread = threading.Thread(target=connect, daemon=True)  # a lookup of names has no time limit of its own
    thread.start()
    # A thread that still waits for a name server is left alone: as a daemon it ends with the program.
    thread.join(SECONDS)
    return outcome[0] if outcome else f"no answer in {SECONDS:g} s"
