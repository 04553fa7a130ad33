"""The suite through `posttrain serve`: what a client gets by token ids keeps the contract as the engine behind the
server does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import cache

import numpy as np
import pytest

from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.endpoint import TokenSampler, discover
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.environment.templates.renderer import Renderer
from posttrain.serve.detokenize import TokenText
from posttrain.serve.intake import ServedModel
from posttrain.serve.listen import listening
from posttrain.serve.routes import Server
from posttrain.system.errors import ConfigError, DataError, EngineError
from posttrain.verifier.http_client import Endpoint, Patience
from tests.conformance import subjects, test_contract, test_many
from tests.conformance.subjects import CONTEXT, SLOTS, Subject, contract

TRUNCATED = ("top_k", "top_p", "min_p", "truncated", "everything")
REFUSED = ("bad", "bad_sequences")
ALIKE: tuple[Callable[[Subject], Awaitable[None]], ...] = (
    test_contract.test_a_log_prob_of_another_contract_would_be_seen,
    test_contract.test_top_tokens_are_the_learners,
    test_contract.test_greedy_is_the_learners_argmax,
    test_contract.test_stop_reasons_are_true,
    test_contract.test_a_stop_string_ends_a_turn_with_the_token_that_completes_it,
    test_contract.test_only_the_contracts_stop_ids_end_a_turn,
    test_contract.test_the_context_ends_a_turn,
    test_contract.test_tokens_are_taken_and_given_as_they_are,
    test_contract.test_characters_that_span_tokens_are_said_whole,
    test_contract.test_the_score_of_a_sequence_is_the_learners,
    test_contract.test_gauges_count_what_was_delivered,
    test_many.test_a_thousand_requests_follow_the_learners_distribution,
    test_many.test_a_seed_says_the_same_again,
    test_many.test_siblings_do_not_repeat_each_other,
    test_many.test_a_cancelled_request_leaves_nothing_and_harms_nobody,
    test_many.test_one_bad_request_does_not_spoil_the_others,
)


@cache
def behind() -> tuple[EmbeddedEngine, Policy]:
    """The engine behind the server, with the weights of seed 1."""
    policy = subjects.new_policy()
    subjects.randomize(policy, 1)
    renderer = Renderer(policy.tokenizer, policy.stop_ids)
    return EmbeddedEngine(policy.clone().module, slots=SLOTS, context=CONTEXT, text=renderer.decode), policy


@asynccontextmanager
async def client() -> AsyncIterator[Subject]:
    """A listening server and a sampler that asks it, as a subject of the suite."""
    engine, policy = behind()
    served = ServedModel(
        sampler=engine,
        renderer=Renderer(policy.tokenizer, policy.stop_ids),
        words=TokenText(policy.tokenizer),
        vocabulary=int(policy.module.get_input_embeddings().weight.shape[0]),  # type: ignore[union-attr]
        name="conformance",
        root="conformance",
        fingerprint="",
        token=None,
        created=0,
    )
    async with (
        listening(Server(served), "127.0.0.1", 0) as url,
        Endpoint(url, "rollout", patience=Patience(tries=1)) as endpoint,
    ):
        sampler = TokenSampler(endpoint, await discover(endpoint))
        yield Subject(
            "served",
            sampler,
            policy,
            HFLearner(policy),
            nullcontext,
            nullcontext,
            nullcontext,
            lambda: not engine._scheduler.busy and not engine._scheduler.queue,
        )


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.prove] * ("a_thousand_requests" in rule.__name__)) for rule in ALIKE],
    ids=lambda rule: rule.__name__.removeprefix("test_"),
)
async def test_a_client_finds_the_rules_kept(rule: Callable[[Subject], Awaitable[None]]) -> None:
    async with client() as subject:
        await rule(subject)


@pytest.mark.parametrize("option", test_contract.OPTIONS)
async def test_log_probs_over_the_wire_are_the_learners(option: str) -> None:
    async with client() as subject:
        wanted = contract(**test_contract.OPTIONS[option])
        if option in TRUNCATED:
            with pytest.raises(ConfigError, match="does not store the kept sets"):
                wanted.for_training(subject.sampler.keeps_sets)
        elif option in REFUSED:
            with pytest.raises(ConfigError, match=r"knows no sampling\.bad_ids"):
                await subject.say(test_contract.prompts(subject), wanted)
        else:
            await test_contract.test_stored_log_probs_are_the_learners(subject, option)


async def test_prompts_that_cannot_be_served_are_refused_before_they_are_sent() -> None:
    async with client() as subject:
        with pytest.raises(EngineError, match="non-empty"):
            await subject.say([np.zeros(0, np.int32)], contract())
        with pytest.raises(DataError, match="leaves no room"):
            await subject.say([np.ones(CONTEXT, np.int32)], contract())
        assert subject.sampler.gauges()["engine/requests"].sum == 0
