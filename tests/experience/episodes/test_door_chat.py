"""The client of the package openai, unmodified, plays episodes by chat completions: a conversation
is one branch of exactly the tokens that were sampled, as by token ids.

Scripted turns show what continues which tokens; turns of an engine show that they are trained on.
"""

import asyncio
import contextlib
import http.client
import json
import time
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from episode_run import episode_run
from logged import lines, numbers
from played import collected, done, episodes, post, tasks
from published_templates import FAMILIES, write_folder
from served import MODEL, parameters

from compass_jax.base.records import GIVEN
from compass_jax.commands.catalogue import source_of
from compass_jax.config import ComputeConfig, EpisodeSource, RolloutConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.turns import turn_encoder
from compass_jax.experience.episodes.play import environment_class, play
from compass_jax.experience.episodes.sessions import Session
from compass_jax.model.params import to_decode
from compass_jax.rewards.tasks.environment import EnvironmentFault, Turn
from compass_jax.rollout.ask import Left, Reply
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.request import Columns
from compass_jax.rollout.serving.door import TrainingDoor
from compass_jax.training.rl import run_rl

QUESTION = [{"role": "user", "content": "How much is 7 - 5?"}]
NEXT = {"role": "user", "content": "And 8 - 5?"}
CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOKENIZERS = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


def tokenizer_of(folders, family="qwen3"):
    if family not in TOKENIZERS:
        TOKENIZERS[family] = Tokenizer.load(write_folder(folders / family, family))
    return TOKENIZERS[family]


class Script:
    """An open session whose turns are these texts, one after another; CUT ends one by length."""

    CUT = "(cut)"

    def __init__(self, tokenizer, texts):
        self.encode, self.eos_id, self.texts = tokenizer.encode, tokenizer.eos_id, iter(texts)
        (task,) = tasks(1)
        self.session = Session(task.sample(0), task, 0, 99, 4000, 3000, 50)
        self.open, self.events = {"open"}, []
        self.door = TrainingDoor(tokenizer, 4000, self.put, lambda token: token in self.open)
        self.url = self.door.url("open")

    def put(self, event):
        self.events.append(event)
        text = None if isinstance(event, Left) else next(self.texts)
        if text is None:  # no turn comes
            return
        words = self.encode(text.removesuffix(self.CUT))
        ends = [] if text.endswith(self.CUT) else [self.eos_id]
        tokens = np.asarray([*words, *ends], np.int32)
        logp = np.linspace(-2, -1, len(tokens), dtype=np.float32)
        request = self.session.ask(event.tokens, event.limit, 4, 1.0, event.agent)
        request.take(Columns.of(tokens, logp, -logp, 4).rows())
        self.session.of(request).take(request)
        event.answer(Reply(tokens, logp, bool(ends)))

    def parts(self):
        """Returns the (given, sampled, given, ...) tokens of the branches."""
        return [
            [part.tolist() for part in np.split(x.tokens, turn_starts(x.versions))]
            for x in self.session.branches
        ]


def turn_starts(versions):
    return np.flatnonzero(np.diff(versions == GIVEN)) + 1


@contextlib.contextmanager
def scripted(tokenizer, *texts):
    """Yields the script, and a function that asks for a turn with OpenAI's client."""
    script = Script(tokenizer, texts)
    try:
        with client_of(f"{script.url}/v1") as client:
            yield script, lambda messages, **fields: chat(client, messages, **fields)
    finally:
        script.door.close()


def client_of(base_url, **options):
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, **options)


def chat(client, messages, **fields):
    return client.chat.completions.create(model="policy", messages=messages, **fields).choices[0]


# ---- which tokens a request continues ------------------------------------------------------------


def test_a_second_request_continues_the_tokens_of_the_first_one_and_its_reply(folders):
    tokenizer = tokenizer_of(folders)
    with scripted(tokenizer, "It is 2.", "It is 3.") as (script, ask):
        first = ask(QUESTION)
        assert (first.message.content, first.finish_reason) == ("It is 2.", "stop")
        second = ask([*QUESTION, first.message, NEXT])
        assert second.message.content == "It is 3."
        ((opening, reply, new, last),) = script.parts()
    assert opening == tokenizer.encode_prompt(QUESTION)
    assert reply == [*tokenizer.encode("It is 2."), tokenizer.eos_id]
    assert new == turn_encoder(tokenizer)(json.dumps([NEXT]), reply)
    assert last == [*tokenizer.encode("It is 3."), tokenizer.eos_id]
    (branch,) = script.session.branches
    assert branch.versions.tolist() == [
        version
        for part, version in ((opening, GIVEN), (reply, 4), (new, GIVEN), (last, 4))
        for _ in part
    ]


# a reply by letters, whose text the tokenizer writes with other tokens
REPLY = "What is the number?"


def letters(tokenizer):
    tokens = [x for letter in REPLY for x in tokenizer.encode(letter)]
    assert len(tokens) > len(tokenizer.encode(REPLY))
    return tokens


def test_a_sampled_text_is_not_tokenised_again(folders):
    tokenizer = tokenizer_of(folders)
    with scripted(tokenizer, REPLY, "It is 3.") as (script, ask):
        script.encode = lambda _: letters(tokenizer)
        assert ask(QUESTION).message.content == REPLY
        ask([*QUESTION, {"role": "assistant", "content": REPLY}, NEXT])
        ((_, reply, _, _),) = script.parts()
    assert reply == [*letters(tokenizer), tokenizer.eos_id]


SENT = {"role": "assistant", "content": REPLY}
REWRITTEN = {
    "the reply": [*QUESTION, {**SENT, "content": REPLY[:-1]}, NEXT],
    "the question": [{"role": "user", "content": "How much is 7-5?"}, SENT, NEXT],
    "a system message": [{"role": "system", "content": "Be brief."}, *QUESTION, SENT, NEXT],
    "a turn of the client's": [*QUESTION, SENT, NEXT, {**SENT, "content": "It is 3."}, NEXT],
    "nothing new": [*QUESTION, SENT],
    "a summary": [NEXT],
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_history_that_was_written_anew_is_rendered_anew_as_a_second_branch(folders, name):
    tokenizer, messages = tokenizer_of(folders), REWRITTEN[name]
    with scripted(tokenizer, REPLY, "It is 3.") as (script, ask):
        script.encode = lambda _: letters(tokenizer)
        ask(QUESTION)
        ask(messages)
        first, second = script.parts()
    assert first[0] == tokenizer.encode_prompt(QUESTION)
    assert second[0] == tokenizer.encode_prompt(messages)
    assert len(first) == len(second) == 2


def test_other_tools_are_another_history(folders):
    with scripted(tokenizer_of(folders), "It is 2.", "It is 3.") as (script, ask):
        first = ask(QUESTION)
        ask([*QUESTION, first.message, NEXT], tools=[TOOL])
        assert len(script.parts()) == 2


def test_a_reply_that_was_cut_is_rendered_anew(folders):
    tokenizer = tokenizer_of(folders)
    with scripted(tokenizer, f"{REPLY}{Script.CUT}", "2.") as (script, ask):
        script.encode = lambda _: letters(tokenizer)
        first = ask(QUESTION)
        assert first.finish_reason == "length"
        ask([*QUESTION, first.message, NEXT])
        first, second = script.parts()
    assert first[1] == letters(tokenizer)
    assert second[0] == tokenizer.encode_prompt([*QUESTION, SENT, NEXT])


def test_an_earlier_reply_is_continued_twice_with_its_exact_tokens(folders):
    with scripted(tokenizer_of(folders), "It is 2.", "It is 3.", "Three.") as (script, ask):
        first = ask(QUESTION)
        for _ in range(2):
            ask([*QUESTION, first.message, NEXT])
        whole, again = script.parts()
    assert again[0] == [*whole[0], *whole[1], *whole[2]]


def test_agents_share_no_conversation(folders):
    with scripted(tokenizer_of(folders), *["It is 2."] * 3) as (script, ask):
        first = ask(QUESTION, extra_headers={"X-Session-ID": "a"})
        for agent in "ab":
            ask([*QUESTION, first.message, NEXT], extra_headers={"X-Session-ID": agent})
        assert [x.agent for x in script.session.branches] == ["a", "b"]
        assert [len(parts) for parts in script.parts()] == [4, 2]


def test_a_session_that_has_ended_leaves_no_conversation(folders):
    with scripted(tokenizer_of(folders), "It is 2.", "It is 3.") as (script, ask):
        ask(QUESTION)
        conversations = script.door._conversations
        assert list(conversations._sessions) == ["open"]
        script.open = {"another"}
        with pytest.raises(openai.NotFoundError, match="no episode with this session"):
            ask(QUESTION)
        script.url = script.door.url("another")
        status, _ = post(script.url, {"messages": QUESTION}, CHAT)
        assert status == 200 and list(conversations._sessions) == ["another"]


THOUGHT = "<think>\n7 - 5\n</think>\n\nIt is 2."


@pytest.mark.parametrize("family", ["qwen3", "qwen3_2507_thinking", "deepseek_r1"])
def test_a_client_may_leave_the_reasoning_out_but_not_rewrite_it(folders, family):
    tokenizer = tokenizer_of(folders, family)
    opened = tokenizer.opened_thought(tokenizer.encode_prompt(QUESTION))
    texts = [THOUGHT.removeprefix(opened), *["It is 3."] * 3]
    with scripted(tokenizer, *texts) as (script, ask):
        first = ask(QUESTION).message
        assert (first.reasoning_content, first.content) == ("7 - 5", "It is 2.")
        plain = {"role": "assistant", "content": "It is 2."}
        for message in (first, plain, {**plain, "reasoning_content": "5 - 7"}):
            ask([*QUESTION, message, NEXT])
        whole, again, rewritten = script.parts()
    sampled = [*tokenizer.encode(texts[0]), tokenizer.eos_id]
    assert whole[1] == sampled and again[0] == [*whole[0], *sampled, *whole[2]]
    assert rewritten[0] == tokenizer.encode_prompt(
        [*QUESTION, {**plain, "reasoning_content": "5 - 7"}, NEXT]
        if tokenizer.template_names("reasoning_content")
        else [*QUESTION, plain, NEXT]
    )


@pytest.mark.parametrize("family", [name for name, x in FAMILIES.items() if x.tools])
def test_the_answer_to_a_call_continues_the_tokens_of_the_call(folders, family):
    tokenizer = tokenizer_of(folders, family)
    opened = tokenizer.opened_thought(tokenizer.encode_prompt(QUESTION, [TOOL]))
    closed = f"{tokenizer.chat_format.closing(opened)}\n\n" if opened else ""
    with scripted(tokenizer, f"{closed}{CALL}", f"{closed}Sunny.") as (script, ask):
        first = ask(QUESTION, tools=[TOOL])
        assert first.finish_reason == "tool_calls" and first.message.content is None
        (call,) = first.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        tool = {"role": "tool", "tool_call_id": call.id, "content": "It is warm."}
        second = ask([*QUESTION, first.message, tool], tools=[TOOL])
        assert (second.message.content, second.message.tool_calls) == ("Sunny.", None)
        ((opening, reply, new, last),) = script.parts()
    assert opening == tokenizer.encode_prompt(QUESTION, [TOOL])
    assert reply == [*tokenizer.encode(f"{closed}{CALL}"), tokenizer.eos_id]
    assert new == turn_encoder(tokenizer)(json.dumps([tool]), reply)
    assert "It is warm." in tokenizer.decode(new) and len(last) > 1


def test_a_repeated_call_has_the_same_id(folders):
    calls = []
    for _ in range(2):
        with scripted(tokenizer_of(folders), f"{CALL}\n{CALL}") as (_, ask):
            calls.append([call.id for call in ask(QUESTION, tools=[TOOL]).message.tool_calls])
    assert calls[0] == calls[1] and len({*calls[0]}) == 2


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "stream": (True, "a turn is sent as a whole"),
    "stream_options": ({"include_usage": True}, "a turn is sent as a whole"),
    "n": (2, "send a request for each"),
    "seed": (5, "leave the seed out"),
    "stop": ("a", "turns end at the end tokens"),
    "logit_bias": ({"5": 1}, "is not supported; leave it out"),
    "presence_penalty": (0.5, "is not supported; leave it out"),
    "frequency_penalty": (0.5, "is not supported; leave it out"),
    "repetition_penalty": (1.5, "is not supported; leave it out"),
    "min_p": (0.5, "is not supported; leave it out"),
    "top_logprobs": (3, "only the sampled tokens have log-probs here; leave it out"),
    "response_format": ({"type": "json_object"}, "does not constrain"),
    "tool_choice": ("required", "use auto or none"),
    "parallel_tool_calls": (False, "is not supported; leave it out"),
    "chat_template_kwargs": ({"enable_thinking": False}, "data.template_args"),
    "reasoning_effort": ("low", "is not supported; leave it out"),
    "model": ("gpt", "'policy' is"),
}


def test_each_field_that_a_turn_has_not_is_refused_by_name(folders):
    with scripted(tokenizer_of(folders), "Right.") as (script, ask):
        for name, (value, reason) in REFUSED.items():
            status, reply = post(script.url, {"messages": QUESTION, name: value}, CHAT)
            assert status == (404 if name == "model" else 400)
            error = reply["error"]
            assert error["param"] == name, (name, error)
            assert name in error["message"] and reason in error["message"], (name, error)
        assert not script.events
        neutral = {"n": 1, "stream": False, "logit_bias": {}, "presence_penalty": 0, "stop": None}
        assert ask(QUESTION, **neutral).message.content == "Right."


def test_what_the_template_does_not_show_is_refused_with_its_reason(folders):
    with scripted(tokenizer_of(folders), "It is 2.") as (script, ask):
        first = ask(QUESTION)
        with pytest.raises(openai.BadRequestError, match="does not show the name"):
            ask([*QUESTION, first.message, {**NEXT, "name": "Al"}])
        assert len(script.events) == 1


def test_messages_that_are_too_long_are_refused_with_the_limit_and_its_setting(folders):
    limit = "this server takes 4000: shorten it, or raise rollout.prompt_buckets"
    with scripted(tokenizer_of(folders)) as (script, ask):
        with pytest.raises(openai.BadRequestError, match=limit):
            ask([{"role": "user", "content": "7 - 5 " * 2000}])
        with pytest.raises(openai.BadRequestError, match=r"that this server takes \(rollout\."):
            ask([{"role": "user", "content": "7 - 5 " * 100_000}])
        assert not script.events


def test_log_probs_are_those_of_the_sampled_tokens(folders):
    with scripted(tokenizer_of(folders), "It is 2.") as (script, ask):
        choice = ask(QUESTION, logprobs=True)
        (branch,) = script.session.branches
    assert [x.logprob for x in choice.logprobs.content] == branch.logp[-branch.sampled :].tolist()
    text = b"".join(bytes(x.bytes) for x in choice.logprobs.content[:-1])
    assert text == b"It is 2." and not choice.logprobs.content[0].top_logprobs


def test_a_client_that_leaves_ends_its_request(folders, monkeypatch):
    monkeypatch.setattr("compass_jax.rollout.serving.door.WATCH_S", 0.01)
    with scripted(tokenizer_of(folders), None, "It is 2.") as (script, ask):
        host, _, path = script.url.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host)
        body, kind = json.dumps({"messages": QUESTION}), {"content-type": "application/json"}
        connection.request("POST", f"/{path}{CHAT}", body, kind)
        while not script.events:
            time.sleep(0.01)
        connection.close()
        while len(script.events) < 2:
            time.sleep(0.01)
        request, left = script.events
        assert left == Left(request)
        assert ask(QUESTION).message.content == "It is 2."


# ---- turns of an engine --------------------------------------------------------------------------

ROLL = RolloutConfig(
    slots=2, prompt_buckets=(96,), max_new_tokens=256, tokens_per_call=8, cache_bucket=352
)
LIMIT = 80


def ending_parameters(end):
    """Returns parameters that often draw the end token."""
    params = parameters()
    return {**params, "head": params["head"].at[:, end].multiply(4)}


def played_by(script, tokenizer):
    """Returns the collection and rollouts of the episodes that a script plays, and the verdicts."""
    engine = Engine(MODEL, ComputeConfig(), ROLL, tokenizer.end_ids, known=tokenizer.vocab_size)
    params = to_decode(ending_parameters(tokenizer.eos_id))
    with episodes(script, rollout=ROLL, tokenizer=tokenizer) as played:
        job, rollouts = collected(played, tasks(2), samples=2, engine=engine, params=params)
        verdicts = dict(played.verdicts)
    assert [x.detail for x in verdicts.values()] == [""] * 4
    return job, rollouts, verdicts


def by_chats(texts):
    """Returns a script of up to three turns by chats, whose texts it puts into `texts`."""

    def script(order, driver):
        messages, replies = list(QUESTION), []
        with client_of(order.base_url) as client:
            for _ in range(3):
                choice = chat(client, messages, max_tokens=LIMIT)
                replies.append(choice.message.content)
                if choice.finish_reason == "length":
                    break
                messages += [choice.message, NEXT]
        texts.append(replies)
        return done(order, len(replies) / 4)

    return script


def by_ids(tokenizer):
    """Returns the script of the same turns by token ids."""
    encode = turn_encoder(tokenizer)

    def script(order, driver):
        tokens, count = tokenizer.encode_prompt(QUESTION), 0
        for _ in range(3):
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": LIMIT}}
            choice, count = post(order.url, body)[1]["choices"][0], count + 1
            if choice["finish_reason"] == "length":
                break
            tokens += choice["token_ids"]
            tokens += encode(json.dumps([NEXT]), choice["token_ids"])
        return done(order, count / 4)

    return script


def test_an_episode_by_chats_is_that_by_token_ids_bit_for_bit(folders):
    """Tokens, log-probs, entropies, versions, routes and rewards are those of the same turns by
    /inference/v1/generate.
    """
    tokenizer, texts = tokenizer_of(folders), []
    job, rollouts, verdicts = played_by(by_chats(texts), tokenizer)
    other_job, others, other_verdicts = played_by(by_ids(tokenizer), tokenizer)
    assert verdicts == other_verdicts
    assert {x.episode["branches"] for x in verdicts.values()} == {1}
    assert max(x.episode["turns"] for x in verdicts.values()) == 3
    for key, rollout in rollouts.items():
        for name in ("tokens", "logp", "entropy", "versions"):
            np.testing.assert_array_equal(getattr(rollout, name), getattr(others[key], name))
        assert set(rollout.versions) == {GIVEN, 4}
    np.testing.assert_array_equal(np.asarray(job.routes), np.asarray(other_job.routes))
    turns = [np.split(x.tokens, turn_starts(x.versions))[1::2] for x in rollouts.values()]
    read = tokenizer.chat_format.read
    assert sorted(texts) == sorted(
        [read(tokenizer.decode_response(part)).text for part in parts] for parts in turns
    )


def test_a_run_on_a_harness_trains_as_that_on_its_environment(tmp_path):
    """A harness that plays whole episodes with OpenAI's client, and the class that is asked for
    replies turn by turn, have the same samples, rewards and updates.
    """
    rows = {}
    for env in ("Stepping", "Chatting"):
        folder = tmp_path / env
        folder.mkdir()
        run_rl(episode_run(folder, env, source={"label": "count"}))
        rows[env] = numbers(folder / "run"), lines(folder / "run", "rollouts")
    (expected, expected_groups), (measured, groups) = rows.values()
    assert len(expected) == len(measured) == 2
    for row, other in zip(expected, measured, strict=True):
        assert row.keys() == other.keys() and row["episode/turns"] > 1
        assert other["episode/branches"] == 1 and other["mismatch/kl_k3"] < 1e-10
        for name in row:
            np.testing.assert_allclose(other[name], row[name], rtol=1e-5, atol=1e-7, err_msg=name)
    texts = [
        [x["response"] for group in y for x in group["samples"]] for y in (expected_groups, groups)
    ]
    assert texts[0] == texts[1]


class Asking:
    @staticmethod
    def rows(seed):
        yield {"prompt": "a"}

    async def play(self, row, seed, base_url):
        return Turn(reward=row["n"] + seed, components={"length": float(len(base_url))})


class Failing(Asking):
    result = 1.0

    def play(self, row):
        return self.result


def test_an_environment_that_plays_gets_the_address_and_returns_its_turn():
    order = SimpleNamespace(row={"n": 1}, seed=2, base_url="http://x/v1")
    verdict = asyncio.run(play(Asking(), order, None, None))
    assert verdict == {"reward": 3.0, "metrics": {"length": 11.0}, "end": "environment"}
    with pytest.raises(EnvironmentFault, match="gave a float: make it a Turn"):
        asyncio.run(play(Failing(), order, None, None))
    Failing.result = Turn(0.5)  # the first field is the messages
    with pytest.raises(EnvironmentFault, match=r"messages is 0.5: a reward is given as Turn\(rew"):
        asyncio.run(play(Failing(), order, None, None))
    for name in ("Asking", "Failing"):
        assert environment_class(f"{__file__}:{name}", {}).__name__ == name
        assert isinstance(source_of(f"{__file__}:{name}"), EpisodeSource)
