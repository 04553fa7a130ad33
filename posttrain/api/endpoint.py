"""`posttrain eval URL`: an environment's held-out tasks put to a model that somebody else serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import ConfigError
from posttrain.core.ports import Environment
from posttrain.core.run import Evaluation, Run
from posttrain.core.sampling import Sampling
from posttrain.engine.checkpoint import read_tokenizer
from posttrain.engine.endpoint import Endpoint, Patience
from posttrain.engine.models import resolve_stops
from posttrain.engine.openai import RemoteModel, TextSampler, TextVocabulary, TokenSampler, discover
from posttrain.engine.openai.body import check
from posttrain.environment.render import RenderedDialogue, Renderer
from posttrain.role.evaluate import EvaluationReport, evaluate
from posttrain.role.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """How to reach and to ask an endpoint."""

    model: str | None = None
    """None: the only one it serves."""
    key_env: str | None = None
    """Name of the environment variable with the key."""
    tokenizer: str | None = None
    """Directory, hub id or run folder of the model's tokenizer: prompts go as token ids. None: text alone."""
    api: Literal["chat", "completions"] = "chat"
    """Where there is no tokenizer: messages, or plain text to go on with."""
    dialect: str | None = None
    """None: told from who owns the model (`engine.openai.discover`)."""
    patience: Patience = Patience()


def is_url(target: str | Path) -> bool:
    """Whether an evaluation's target is an endpoint."""
    return str(target).startswith(("http://", "https://"))


def remote_run(name: str) -> Run:
    """The run that stands for an endpoint: an evaluation of `arithmetic` until overrides say otherwise."""
    from posttrain.core.run import Env, Model, Reinforce

    return Run(recipe="eval", model=Model(path=name), env=Env(), stages=(Reinforce(name="eval"),))


@asynccontextmanager
async def remote_rollout(
    url: str, how: EndpointOptions, environment: Environment, contract: Sampling, *, connections: int, seed: int
) -> AsyncIterator[tuple[Rollout, Sampling, RemoteModel]]:
    """(rollout over the endpoint, the contract its episodes carry, what the endpoint is); its connections end with the
    block.

    Raises:
        ConfigError: the endpoint has no such model, or cannot be asked for the contract.
        EndpointError: it does not answer as it should.
    """
    async with Endpoint(
        url, "rollout", key_env=how.key_env, patience=how.patience, connections=connections
    ) as endpoint:
        found = await discover(endpoint, how.model, how.dialect)
        check(contract, found, chat=how.tokenizer is None and how.api == "chat")
        cut = contract if contract.truncated else None
        told = replace(contract, top_p=1.0, top_k=0, min_p=0.0, top=0)
        if how.tokenizer is None:
            text = TextSampler(endpoint, found, TextVocabulary(), way=how.api, cut=cut)
            yield Rollout(text, environment, text.dialogue, seed), told.resolve(()), found
            return
        dialogue, stops = _tokens(how.tokenizer, found)
        yield Rollout(TokenSampler(endpoint, found, cut=cut), environment, dialogue, seed), told.resolve(stops), found


def _tokens(path: str, found: RemoteModel) -> tuple[Callable[[str], RenderedDialogue], tuple[int, ...]]:
    """(encoder of conversations, stop ids) of a tokenizer."""
    run_folder = Path(path, "run.json").exists()
    tokenizer, config = read_tokenizer(str(Path(path, "tokenizer")) if run_folder else path)
    stops = resolve_stops(tokenizer, config)
    plain: Any = tokenizer
    renderer = Renderer(plain, stops, found.context)
    return (lambda task: RenderedDialogue(renderer, task)), stops


async def evaluate_remote(
    url: str,
    how: EndpointOptions,
    run: Run,
    environment: Environment,
    contract: Sampling,
    measure: Evaluation,
    say: Callable[[str], None],
) -> EvaluationReport:
    """Held-out accuracy of whatever answers at `url`, with at most `run.slots` requests at once."""
    async with remote_rollout(url, how, environment, contract, connections=run.slots, seed=run.seed) as (
        rollout,
        told,
        found,
    ):
        by = (
            f"token ids of {how.tokenizer}"
            if how.tokenizer
            else f"text ({how.api}); its own chat template and end of turn"
        )
        say(f"endpoint: {url}, model {found.model}, dialect {found.dialect}; by {by}")
        return await evaluate(replace(rollout, limits=run.env.limits), environment.heldout, told, measure)


def refuse(how: EndpointOptions) -> None:
    """ConfigError where options of an endpoint were given for a target that is none."""
    names = {"model": "--model", "key_env": "--key-env", "tokenizer": "--tokenizer", "dialect": "--dialect"}
    given = [flag for name, flag in names.items() if getattr(how, name) is not None]
    given += ["--api"] if how.api != "chat" else []
    if given:
        raise ConfigError(
            f"{', '.join(given)} belongs to an endpoint: give its address as the target (http://127.0.0.1:8000/v1)"
        )
