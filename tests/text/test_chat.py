"""Chat templates: what they write, what they refuse, and how a conversation begins (cases E4, F1, F3, F5)."""

# ruff: noqa: E501 (a template reads best on one line)

import json
import re
from pathlib import Path

import jinja2
import numpy as np
import pytest
from jinja2.exceptions import SecurityError

import ropewalk
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.errors import TemplateError
from ropewalk.text.chat import ChatTemplate, encode_chat
from ropewalk.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a rope?"},
    {"role": "assistant", "content": "Twisted yarn.\n"},
    {"role": "user", "content": "<b>Thanks</b> & {{ bye }}"},
]
TOOLS = [{"type": "function", "function": {"name": "length", "description": "of a <rope>", "parameters": {}}}]
CALLS = [
    HI[0],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "length", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "12 m"},
    {"role": "tool", "content": "13 m"},
]


def render(source, messages=HI, **variables):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **variables)


def render_plainly(source, messages, **variables):
    """The same in a bare Jinja environment set up as transformers sets up its own."""
    environment = jinja2.Environment(  # noqa: TID251
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment.from_string(source).render(messages=messages, **variables)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_the_models_templates_render_as_in_plain_jinja(model_path, name):
    with open_gguf(model_path(name)) as file:
        template = ChatTemplate.from_metadata(file.metadata)
    parsed = [dict(message) for message in CALLS]
    parsed[1] |= {"content": "", "tool_calls": [{"function": {"name": "length", "arguments": {}}}]}
    conversations = [(HI, HI), (CHAT, CHAT), (CHAT[1:], CHAT[1:])]
    if name != "smollm2-135m":  # whose template knows no tools
        conversations.append((CALLS, parsed))
    for messages, plain in conversations:
        for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}, {"tools": TOOLS}):
            expected = render_plainly(template.source, plain, **{"add_generation_prompt": True} | options)
            assert template.render(messages, **options) == expected


def test_smollm2_conversation(smollm2):
    with open_gguf(smollm2) as file:
        template = ChatTemplate.from_metadata(file.metadata)
        tokenizer = Tokenizer.from_metadata(file.metadata)
    text = template.render(CHAT[:2])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is a rope?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = encode_chat(tokenizer, text)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert tokenizer.decode(ids, skip_special=False) == text


def test_a_base_model_has_no_template(model_path):
    with open_gguf(model_path("gemma3-270m")) as file:
        assert ChatTemplate.from_metadata(file.metadata) is None


def test_start_and_end_tokens_come_from_the_metadata():
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}",
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    assert ChatTemplate.from_metadata(metadata).render(HI) == "<s>|</s>|Hi"
    del metadata["tokenizer.ggml.eos_token_id"]
    assert ChatTemplate.from_metadata(metadata).render(HI) == "<s>||Hi"
    with pytest.raises(TemplateError, match="chat_template is a int"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 3})


# What templates may count on


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\nU:{{ m.content }}\n  {% endif %}\n{% endfor %}", "U:Hi\n"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': '<é>', 'b': [1, true, none]} | tojson }}", '{"a": "<é>", "b": [1, true, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}", '"\\u00e9"[1,2]'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{{ undefined_name }}{{ messages[0].nothing is defined }}", "False"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x, y='!') %}{{ x ~ y }}{% endmacro %}{{ f('a') }}{{ f('b', y='?') }}", "a!b?"),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}in{% endcall %}", "[in]"),
        ("{% for x in [1, [2, [3]]] recursive %}{% if x is number %}{{ x }}{% else %}({{ loop(x) }}){% endif %}{% endfor %}", "1(2(3))"),
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
        ("{% for c in 'abc' if c != 'b' %}{{ loop.index0 }}{{ c }}{{ loop.previtem }}{% endfor %}", "0a1ca"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in nothing %}x{% else %}none{% endfor %}", "a1none"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}", "Hi"),
        ("{{ '  x '.strip() | upper }}{{ 'a-b'.split('-') | last }}{{ 'ab'[::-1] }}{{ 'x' * 3 }}{{ [1] + [2] }}", "Xbbaxxx[1, 2]"),
        ("{{ '%s and %05.1f' % ('a', 2) }}|{{ '{{}} {0:>3}'.format('b') }}|{{ '%d' | format(3) }}", "a and 002.0|{}   b|3"),
        ("{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 1 - 2 }}{{ 'a' in 'cat' }}{{ 2 in [1, 2] }}", "310243-1TrueTrue"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'x' | center(3) }}|{{ 'aXbX' | replace('X', '--') }}", "a\n  b| x |a--b--"),
        ("{% filter upper %}ab{{ messages[0].content }}{% endfilter %}", "ABHI"),
        ("{% set x %}<{{ messages[0].content }}>{% endset %}{{ x }}{{ x | length }}", "<Hi>4"),
        ("{{ messages[0]['content'][0] }}{{ messages[-1].content[:1] }}{{ messages | length }}", "HH1"),
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}", "<s></s>TrueTrueTrue"),
        ("{{ enable_thinking }}", "yes"),
        ("{% for x in ['a b', 'c'] %}{{ '-'.join(x.split(' ')) }}{{ x.replace('c', 'd') }}{{ '{}'.format(x) }};{% endfor %}", "a-ba ba b;cdc;"),
        ("{{ 'a b' | title }}{{ 'a b' | wordcount }}{{ '<b>x</b>' | striptags }}{{ [2, 1] | sort }}{{ 'ab' | list }}", "A B2x[1, 2]['a', 'b']"),
        ("{{ [{'a': 1}] | groupby('a') | length }}{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}", "1[[1, 2], [3]][[1, 2], [3]]"),
        ("{{ 2.567 | round(1) }}{{ [1, 2] | sum }}{{ '12' | int }}{{ 'abcdef' | truncate(3, true, '', 0) }}{{ 'a,b'.split(',') }}", "2.6312abc['a', 'b']"),
        ("{{ 'é ' | urlencode }}{{ '<' | escape }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 1] | unique | list }}{{ 'a\nb'.splitlines() }}", "%C3%A9%20&lt;[('a', 2), ('b', 1)][1]['a', 'b']"),
    ],
)  # fmt: skip
def test_what_templates_may_count_on(source, expected):
    assert render(source, enable_thinking="yes") == expected


def test_the_time_can_be_asked():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_two_renderings_of_one_template_are_independent():
    template = ChatTemplate(
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}{% endfor %}{{ ns.t }}"
    )
    assert [template.render(HI), template.render(CHAT[:1]), template.render(HI)] == ["Hi", "Be brief.", "Hi"]


def test_messages_are_not_changed():
    messages = json.loads(json.dumps(CALLS))
    render("{{ messages | length }}", messages)
    assert messages == CALLS


# F1: the sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ '' | attr('__class__') }}", "{{ cycler.__init__ }}",
        "{{ lipsum.__globals__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.clear() }}", "{{ ().__class__.__mro__[1].__subclasses__() }}", "{{ '{0.__class__}'.format('') }}",
        "{{ '{x.__class__}'.format_map({'x': ''}) }}", "{{ raise_exception.__globals__ }}", "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__ }}", "{{ joiner.__init__.__globals__ }}", "{{ range.__globals__ }}", "{{ messages.sort() }}",
        "{% for x in messages %}{{ loop.__class__ }}{% endfor %}", "{{ [''] | map('attr', '__class__') | join }}",
        "{{ [''] | map(attribute='__class__') | join }}", "{{ ''.encode() }}", "{{ ''.translate({}) }}", "{{ lipsum() }}",
        "{{ (1).to_bytes(3) }}", "{{ {}.fromkeys('x') }}",
    ],
)  # fmt: skip
def test_f1_python_cannot_be_reached(source):
    """F1: each ends in Jinja's SecurityError, reported as TemplateError; to read is enough, without further use."""
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert isinstance(caught.value.__cause__, SecurityError)


def test_f1_there_is_no_other_jinja_environment():
    """Jinja is imported in these files alone, and one environment is made in one of them."""
    root = Path(ropewalk.__file__).parent
    sources = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in root.rglob("*.py")}
    using = {
        name: text for name, text in sources.items() if re.search(r"^\s*(import|from) jinja2", text, re.M)
    }
    assert set(using) == {f"text/{name}.py" for name in ("budget", "chat", "payments", "sandbox")}
    made = re.compile(r"(?<!class )\b(?:Template|\w*Environment)\(")
    found = [(name, match) for name, text in using.items() for match in made.findall(text)]
    assert found == [("text/chat.py", "ChatEnvironment(")]
    assert "class ChatEnvironment(ImmutableSandboxedEnvironment):" in using["text/sandbox.py"]


# F3: refusals


REFUSING = """{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{{ m.content }}{% endfor %}"""


def test_f3_the_templates_own_words():
    with pytest.raises(TemplateError, match=r"^System role not supported$"):
        render(REFUSING, CHAT)
    with pytest.raises(
        TemplateError, match=r"^Conversation roles must alternate user/assistant/user/assistant/\.\.\.$"
    ):
        render(REFUSING, HI + HI)
    assert render(REFUSING, HI) == "Hi"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one message"), (5, "list"), (b"Hi", "list"), ("Hi", "list"), ({"role": "user"}, "list"), (["Hi"], "message 0 is 'Hi'"),
        ([{"content": "Hi"}], "message 0 has the role None"), ([{"role": 3, "content": "x"}], "message 0 has the role 3"),
        ([{"role": "user", "content": 3}], "message 0 has the content 3; allowed: a text"), ([{"role": "user", "content": [{"type": "image_url"}]}], "allowed: a text"),
        ([*HI, {"role": "user"}], "message 1 has no content"), ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "assistant", "tool_calls": "x"}], "message 0 has tool_calls 'x'"),
    ],
)  # fmt: skip
def test_f3_malformed_messages(messages, said):
    with pytest.raises(TemplateError, match=said):
        render("{{ messages[0].content }}", messages)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages[5].content }}", "no element 5|has no attribute|undefined"), ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ nothing() }}", "'nothing' is undefined"), ("{{ 'a' + 1 }}", "str"), ("{{ 1 / 0 }}", "division by zero"),
        ("{% for x in none %}{% endfor %}", "not iterable"), ("{{ messages[0].content | tojson | no_such }}", "no_such"),
        ("{% if %}", "cannot be compiled"), ("{{ x", "cannot be compiled"), ("{% include 'x' %}", "failed"), ("{% extends 'x' %}", "failed"),
        ("{% import 'x' as x %}", "failed"), ("{{ messages | tojson(bad=1) }}", "bad"), ("{{ nothing | tojson }}", "Undefined"),
        ("{{ raise_exception() }}", "message"), ("{{ {[]: 1} }}", "unhashable"), ("{{ 'x' is no_such }}", "no_such"),
    ],
)  # fmt: skip
def test_f3_faults_in_a_template_are_template_errors(source, said):
    with pytest.raises(TemplateError, match=said):
        render(source)


# F5: tool calls


def test_f5_arguments_sent_as_text_become_an_object():
    """F5: a template may iterate over them; text that is no JSON object stays text; null content becomes ""."""
    source = (
        "{% for m in messages %}{{ m.content + '|' }}{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
        "{% if f.arguments is mapping %}{% for k, v in f.arguments | items %}{{ k }}={{ v }};{% endfor %}"
        "{% else %}{{ f.arguments }}{% endif %}{% endfor %}{% endfor %}"
    )

    def with_arguments(arguments, nested=True):
        function = {"name": "f", "arguments": arguments}
        call = {"id": "1", "type": "function", "function": function} if nested else function
        return render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert with_arguments('{"a": 1, "b": "x"}') == "|a=1;b=x;"
    assert with_arguments('{"a": 1}', nested=False) == "|a=1;"
    assert with_arguments({"a": 1}) == "|a=1;"
    assert with_arguments("not json") == "|not json"
    assert with_arguments("[1, 2]") == "|[1, 2]"
    assert with_arguments("[" * 100_000) == "|" + "[" * 100_000
    assert render(source, [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}]) == "|"


# E4: one start token


def tokenizer_with(*, add_bos: bool) -> Tokenizer:
    texts = ["<unk>", "<s>", "</s>", "[gMask]", "H", "i", "Hi", "▁"]
    kinds = [2, 3, 3, 3, 1, 1, 1, 1]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": texts,
            "tokenizer.ggml.scores": np.zeros(len(texts), np.float32),
            "tokenizer.ggml.token_type": np.array(kinds, np.int32),
            "tokenizer.ggml.add_bos_token": add_bos,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )


@pytest.mark.parametrize(
    ("writes", "add_bos", "expected"),
    [(True, True, [1, 6]), (False, True, [1, 6]), (True, False, [1, 6]), (False, False, [6])],
)
def test_e4_exactly_one_start_token(writes, add_bos, expected):
    """E4: template writes it or not × the model wants it or not: one, one, one, none."""
    text = render(("{{ bos_token }}" if writes else "") + "{{ messages[0].content }}")
    tokenizer = tokenizer_with(add_bos=add_bos)
    assert encode_chat(tokenizer, text) == expected
    if not writes:
        assert tokenizer.encode(text, parse_special=True) == expected


def test_e4_a_start_that_only_the_template_writes_is_left_alone():
    """GLM's [gMask]<s> with add_bos=false."""
    assert encode_chat(tokenizer_with(add_bos=False), render("[gMask]<s>{{ messages[0].content }}")) == [
        3,
        1,
        6,
    ]


def test_a_list_of_parts_is_their_text_together():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert render("{{ messages[0].content + '!' }}", [{"role": "user", "content": parts}]) == "Hi there!"
