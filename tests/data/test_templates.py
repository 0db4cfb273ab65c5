"""Chat templates of a downloaded tokenizer: none hangs, fills the memory or ends in a traceback;
good ones render as they did in this process.
"""

import os
import signal
import threading
import time

import jinja2
import pytest

from compass_jax.data import templates
from compass_jax.data.template_worker import MOST_TEXT, environment
from compass_jax.data.templates import Job, Renderer, TemplateFailure, TemplateLimit
from compass_jax.data.tokenizer_training import CHATML

CHAT = [
    {"role": "user", "content": "12 + 5 = é \U0001f600"},
    {"role": "assistant", "content": "\n17"},
]


@pytest.fixture(scope="module")
def renderer():
    return Renderer()


def failure(renderer, template, messages=CHAT):
    (found,) = renderer.render(template, {}, [Job(messages, len(messages), True)])
    assert isinstance(found, TemplateFailure), f"rendered: {found!r:.80}"
    return found


HUGE = [
    "{{ 'x' * 10**11 }}",
    "{{ 'x'.ljust(10**11) }}",
    "{{ 'x'.center(10**11) }}",
    "{{ 'x' | center(10**11) }}",
    "{{ 'a\nb' | indent(10**11) }}",
    "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ [0] * 10**11 }}",
    "{{ namespace(x=[[1] * 10**9]).x }}",
    (
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor"
        " %}{{ n.s }}"
    ),
    "{% for i in range(10**4) %}{{ 'x' * 10**4 }}{% endfor %}",
]
FAULTY = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages[0].content + 1 }}": "TypeError",
    "{{ messages[9].content.x }}": "has no element 9",
    "{{ unknown.attribute }}": "'unknown' is undefined",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "RecursionError",
    "{% for %}": "Expected",
    "{{": "end of template",
    "{% include 'x' %}": "no loader",
    "{{ 'x' | nothing }}": "No filter named",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ raise_exception('no system role here') }}": "no system role here",
    "{{ range(10**9) }}": "Range too big",
    "{{ lipsum(n=10**9) }}": "'lipsum' is undefined",
    "{{ cycler('a').next() }}": "'cycler' is undefined",
    "{{ '{:d}'.format('x') }}": "ValueError",
    "{{ ('x' * 100) | tojson(indent='y', sort_keys=1) + {}[1] }}": "",
    "{{ {1: 2, 'a': 3} | tojson(sort_keys=True) }}": "TypeError",
    "{{ " + "9" * 5000 + " }}": "",
}


@pytest.mark.parametrize("template", HUGE)
def test_a_template_that_takes_all_memory_is_refused(renderer, template):
    found = failure(renderer, template)
    assert any(
        words in str(found)
        for words in ("MiB of memory", "characters", "OverflowError", "MemoryError")
    )


@pytest.mark.parametrize("template", FAULTY)
def test_any_exception_of_a_template_is_a_refusal_in_its_words(renderer, template):
    found = failure(renderer, template)
    assert (
        FAULTY[template] in str(found)
        and not isinstance(found, TemplateLimit)
        and len(str(found)) < 700
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ [1] | slice(10**10) | list }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_that_never_ends_is_ended(template):
    """In its first second here: the limit itself is only a longer wait."""
    renderer = Renderer()
    assert renderer.render("ok", {}, [Job(CHAT, 2, True)]) == ["ok"]
    worker = renderer._process.process.pid
    os.kill(worker, 0)
    # what the kernel sends at the limit
    threading.Timer(1.0, os.kill, (worker, signal.SIGXCPU)).start()
    assert "takes longer than" in str(failure(renderer, template))
    assert renderer.render("ok", {}, [Job(CHAT, 2, True)]) == ["ok"]


def test_the_kernel_ends_a_request_at_its_limit_of_processor_time(renderer):
    started = time.monotonic()
    found = failure(
        renderer, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    assert isinstance(found, TemplateLimit) and "takes longer than" in str(found)
    assert time.monotonic() - started < 120


def test_one_bad_conversation_of_many_is_found_and_those_before_it_are_rendered(renderer):
    template = (
        "{% if messages[0].content == 'bad' %}{{ 'x' * 10**11 }}{% endif %}{{"
        " messages[0].content }}"
    )
    good = [Job([{"role": "user", "content": str(i)}], 1, True) for i in range(20)]
    found = renderer.render(
        template, {}, [*good[:9], Job([{"role": "user", "content": "bad"}], 1, True), *good[9:]]
    )
    assert found[:9] == [str(i) for i in range(9)]
    assert all(isinstance(x, TemplateLimit) for x in found[9:]) and len(found) == 21


def test_a_text_that_is_too_long_is_a_limit_after_which_nothing_is_tried(renderer):
    template = (
        "{% if messages[0].content == '3' %}{{ ('x' * 10**6) * 9 }}{% endif %}{{"
        " messages[0].content }}"
    )
    found = renderer.render(
        template, {}, [Job([{"role": "user", "content": str(i)}], 1, True) for i in range(600)]
    )
    assert found[:3] == ["0", "1", "2"] and len(found) == 600
    assert all(isinstance(x, TemplateLimit) and "it writes 9,0" in str(x) for x in found[3:])


def test_a_refusal_in_the_middle_leaves_the_others_as_they_are(renderer):
    template = "{% if messages[0].content == '3' %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}"
    found = renderer.render(
        template, {}, [Job([{"role": "user", "content": str(i)}], 1, True) for i in range(600)]
    )
    assert [i for i, x in enumerate(found) if not isinstance(x, str)] == [3] and found[599] == "599"


def test_what_is_rendered_is_what_jinja_renders_here(renderer):
    variables = {"eos_token": "</s>", "bos_token": "<s>"}
    template = (
        CHATML
        + "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ eos_token }}{% endfor %}{{"
        " strftime_now is defined }}"
    )
    jobs = [Job(CHAT, n, add) for n in (0, 1, 2) for add in (False, True)]
    expected = [
        environment()
        .from_string(template)
        .render(messages=CHAT[:n], add_generation_prompt=add, **variables)
        for _, n, add, _ in jobs
    ]
    assert renderer.render(template, variables, jobs) == expected
    assert isinstance(environment(), jinja2.sandbox.ImmutableSandboxedEnvironment)


def test_a_text_as_long_as_it_may_be_is_rendered_and_a_longer_one_is_not(renderer):
    assert (
        len(renderer.render(f"{{{{ 'x' * {MOST_TEXT} }}}}", {}, [Job(CHAT, 2, True)])[0])
        == MOST_TEXT
    )
    assert "more than" in str(failure(renderer, f"{{{{ 'x' * {MOST_TEXT + 1} }}}}"))


def test_messages_that_are_too_long_or_no_json_are_refused(renderer, monkeypatch):
    monkeypatch.setattr(templates, "MOST_FRAME", 10_000)
    assert "more than" in str(
        failure(renderer, "{{ messages }}", [{"role": "user", "content": "x" * 10_000}])
    )
    assert "JSON" in str(
        failure(renderer, "{{ messages }}", [{"role": "user", "content": object()}])
    )
    assert renderer.render("ok", {}, [Job(CHAT, 2, True)]) == ["ok"]


def test_a_worker_that_was_killed_from_outside_is_replaced():
    renderer = Renderer()
    for _ in range(3):
        assert renderer.render("ok", {}, [Job(CHAT, 2, True)]) == ["ok"]
        renderer._process.process.kill()


def test_a_worker_ends_with_its_renderer_and_knows_no_secrets(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    renderer = Renderer()
    renderer.render("ok", {}, [Job(CHAT, 2, True)])
    process = renderer._process.process
    with open(f"/proc/{process.pid}/environ", "rb") as file:
        assert b"SECRET_TOKEN" not in file.read()
    del renderer
    assert process.wait(30) == -signal.SIGKILL


def test_threads_share_the_worker(renderer):
    found = {}

    def ask(n):
        found[n] = [
            renderer.render(
                "{{ messages[0].content }}", {}, [Job([{"content": f"{n}.{i}"}], 1, True)]
            )[0]
            for i in range(50)
        ]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: [f"{n}.{i}" for i in range(50)] for n in range(8)}
