"""`posttrain eval URL`: evaluate a served model on an environment's held-out tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.config.run import Env, Evaluation, Model, Reinforce, Run
from posttrain.core.ports import Environment
from posttrain.core.sampling import Sampling
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.role.heldout_evaluation import EvaluationReport, evaluate
from posttrain.role.rollout import Rollout
from posttrain.system.errors import ConfigError
from posttrain.verifier.http_client import Endpoint, Patience

if TYPE_CHECKING:
    from posttrain.engine.endpoint import RemoteModel


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """The settings for reaching an endpoint, and the form in which prompts are sent."""

    model: str | None = None
    """Name of the model; None: the only one the endpoint serves."""
    key_env: str | None = None
    """Name of the environment variable that holds the key."""
    tokenizer: str | None = None
    """Directory, hub id or run folder of the model's tokenizer; prompts are sent as token ids. None: as text."""
    api: Literal["chat", "completions"] = "chat"
    """Without a tokenizer: send messages (`chat`), or plain text to continue (`completions`)."""
    dialect: str | None = None
    """The server's API dialect; None: read from the model's `owned_by` (`verifier.discover`)."""
    patience: Patience = Patience()


def is_url(target: str | Path) -> bool:
    """True where an evaluation's target is an endpoint."""
    return str(target).startswith(("http://", "https://"))


def remote_run(name: str) -> Run:
    """A run that evaluates an endpoint, on `arithmetic` unless overrides name another environment."""
    return Run(recipe="eval", model=Model(path=name), env=Env(), stages=(Reinforce(name="eval"),))


@asynccontextmanager
async def remote_rollout(
    url: str, options: EndpointOptions, environment: Environment, contract: Sampling, *, connections: int, seed: int
) -> AsyncIterator[tuple[Rollout, Sampling, RemoteModel]]:
    """(rollout over the endpoint, the contract its episodes carry, the endpoint's model).

    The connections are closed at the end of the block.

    Raises:
        ConfigError: the endpoint has no such model, or cannot keep the contract.
        EndpointError: its answer is not valid.
    """
    from posttrain.engine.endpoint import TextSampler, TextVocabulary, TokenSampler, discover
    from posttrain.engine.endpoint.endpoint_sampler import check

    async with Endpoint(
        url, "rollout", key_env=options.key_env, patience=options.patience, connections=connections
    ) as endpoint:
        remote = await discover(endpoint, options.model, options.dialect)
        check(contract, remote, chat=options.tokenizer is None and options.api == "chat")
        # The contract's truncation (top_p, top_k, min_p) is sent to the server, which truncates by itself.
        cut = contract if contract.truncated else None
        # The episodes carry a contract without truncation. With it each token would need the set of tokens that were
        # kept, and no server returns that.
        carried = replace(contract, top_p=1.0, top_k=0, min_p=0.0, top=0)
        # Without a tokenizer the server applies its own template and stop tokens, so no stop ids are known here.
        if options.tokenizer is None:
            text = TextSampler(endpoint, remote, TextVocabulary(), way=options.api, cut=cut)
            yield Rollout(text, environment, text.dialogue, seed), carried.resolve(()), remote
            return
        dialogue, stops = _dialogue_and_stops(options.tokenizer, remote)
        yield (
            Rollout(TokenSampler(endpoint, remote, cut=cut), environment, dialogue, seed),
            carried.resolve(stops),
            remote,
        )


def _dialogue_and_stops(path: str, remote: RemoteModel) -> tuple[Callable[[str], RenderedDialogue], tuple[int, ...]]:
    """(a function from task id to its dialogue, stop ids) of a tokenizer: a directory, a hub id or a run folder."""
    from posttrain.engine.files.pretrained_files import read_tokenizer
    from posttrain.engine.model.stop_tokens import resolve_stops

    run_folder = Path(path, "run.json").exists()
    tokenizer, config = read_tokenizer(str(Path(path, "tokenizer")) if run_folder else path)
    stops = resolve_stops(tokenizer, config)
    untyped: Any = tokenizer
    renderer = Renderer(untyped, stops, remote.context)
    return (lambda task: RenderedDialogue(renderer, task)), stops


async def evaluate_remote(
    url: str,
    options: EndpointOptions,
    run: Run,
    environment: Environment,
    contract: Sampling,
    measure: Evaluation,
    say: Callable[[str], None],
) -> EvaluationReport:
    """Held-out accuracy of the model at `url`, with at most `run.slots` requests at once."""
    async with remote_rollout(url, options, environment, contract, connections=run.slots, seed=run.seed) as (
        rollout,
        carried,
        remote,
    ):
        form = (
            f"token ids of {options.tokenizer}"
            if options.tokenizer
            else f"text ({options.api}); its own chat template and end of turn"
        )
        say(f"endpoint: {url}, model {remote.model}, dialect {remote.dialect}; by {form}")
        return await evaluate(
            replace(rollout, limits=run.env.limits, right=run.env.named_right(environment.abilities.vouched)),
            environment.heldout,
            carried,
            measure,
        )


def refuse(options: EndpointOptions) -> None:
    """ConfigError where any option of an endpoint is set. It is called for other kinds of target."""
    names = {"model": "--model", "key_env": "--key-env", "tokenizer": "--tokenizer", "dialect": "--dialect"}
    flags = [flag for name, flag in names.items() if getattr(options, name) is not None]
    flags += ["--api"] if options.api != "chat" else []
    if flags:
        raise ConfigError(
            f"{', '.join(flags)} belongs to an endpoint: give its address as the target (http://127.0.0.1:8000/v1)"
        )
