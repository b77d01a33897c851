"""Forced tool calls: on a real server, and for every format on real tokenizers with the server's own grammar engine."""

import asyncio
import json
import time

import pytest

from strands_sglang import SGLangClient, get_tokenizer
from strands_sglang.messages import to_chat_messages, to_chat_tools
from strands_sglang.templates.chat_template import ChatTemplate
from strands_sglang.tool_choice import CALL_FORMATS, forced_call
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY, get_tool_parser
from support.families import FAMILIES, load_tokenizer
from support.forced_calls import ARGUMENTS, TOOLS, run_grammars, wrong_with

# A family for every format.
NAMES = (
    *("qwen3", "qwen3_coder", "glm_4_5", "kimi_k2", "kimi_k3", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2"),
    *("deepseek_v4", "gpt_oss", "llama_3_1", "llama_4", "mistral_nemo", "minimax_m2", "minimax_m3", "gemma_4"),
    *("granite_3", "seed_oss", "phi_4_mini", "smollm3"),
)
_JSON = json.dumps(ARGUMENTS)
_NAMED = f'{{"name": "look_up", "arguments": {_JSON}}}'
_XML = (
    '<parameter=key>a "b"\nc</parameter>\n<parameter=n>3</parameter>\n'
    '<parameter=deep>{"l": [1, 2], "s": "x"}</parameter>\n<parameter=flag>True</parameter>\n'
)
# Where the template writes no such call, or writes values that cannot be read back.
WRITTEN = {
    "phi_4_mini": '<|tool_call|>[{"type": "function", "function": ' + _NAMED + "}]<|/tool_call|>",
    "llama_4": '[look_up(key="a \\"b\\"\\nc", n=3, deep={"l": [1, 2], "s": "x"}, flag=true)]',
    "smollm3": f"<tool_call>\n{_NAMED}\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
    f"{_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "seed_oss": f"<seed:tool_call>\n<function=look_up>\n{_XML}</function>\n</seed:tool_call>",
}
# Where a call does not begin with the parser's mark.
BEGINNINGS = {
    "gpt_oss": " to=functions.look_up",
    "llama_3_1": '{"name": "look_up", "parameters"',
    "granite_3": "<|tool_call|>",
}
THOUGHT = "Hmm. <b>So</b>.\n"


def parser_of(family):
    """The parser of a family."""
    return get_tool_parser(str(family.tool_format))


def stops_of(family):
    """What a server of the family stops at: in gpt-oss, `<|end|>` only ends a message."""
    return tuple(stop for stop in family.end_of_turn if (family.name, stop) != ("gpt_oss", "<|end|>"))


def written_call(family):
    """A call as the family's chat template writes it, without what stands before it and without the stop."""
    if family.name in WRITTEN:
        return WRITTEN[family.name]
    template = ChatTemplate(load_tokenizer(family.name))
    question = {"role": "user", "content": [{"text": "Q?"}]}
    use = {"toolUse": {"toolUseId": "call00001", "name": "look_up", "input": ARGUMENTS}}
    chat = to_chat_messages([question, {"role": "assistant", "content": [use]}])
    text = template.render(chat, to_chat_tools(TOOLS), add_generation_prompt=False)
    behind = text[text.rindex(BEGINNINGS.get(family.name, parser_of(family).tool_start_token)) :]
    stops = (behind.index(stop) for stop in family.end_of_turn if stop in behind)
    return behind[: min(stops, default=len(behind))]  # GLM's template ends a turn by the next one's token


def asked_of(family, folder):
    """What is forced: any tool, perhaps behind reasoning; one behind the prompt's reasoning; one without parameters."""
    parser, tokenizer, call = parser_of(family), load_tokenizer(family.name), written_call(family)
    tokenizer.save_pretrained(folder)
    stop_ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops_of(family)]
    thought = f"{THOUGHT}{parser.think_end_token}{'<|start|>assistant' if family.name == 'gpt_oss' else ''}{call}"
    opening = parser.think_start_token + ("thought\n" if family.name == "gemma_4" else "")
    jobs = []
    pieces = []
    for choice, calls, flags, names in (
        ({"any": {}}, [call, opening + thought], {"may_reason": True}, ("look_up", "now")),
        ({"tool": {"name": "look_up"}}, [thought], {"reasoning_open": True}, ("look_up",)),
        ({"tool": {"name": "now"}}, [], {}, ("now",)),
    ):
        texts = [[*tokenizer.encode(text, add_special_tokens=False), stop_ids[0]] for text in calls]
        pieces += [ids[begin : begin + 3] for ids in texts for begin in range(len(ids))]
        job = {"texts": texts, "walks": 1, "flags": flags, "names": names}
        jobs.append({**(forced_call(parser, TOOLS, choice, **flags) or {}), **job})
    return {"tokenizer": str(folder), "stop_ids": stop_ids, "seed": 0, "pieces": pieces, "ends": pieces, "jobs": jobs}


@pytest.fixture(scope="module")
def walked(sglang_python, tmp_path_factory):
    """By family, the jobs with what the grammar engine made of them; one process for all of them."""
    asked = [asked_of(FAMILIES[name], tmp_path_factory.mktemp(name)) for name in NAMES]
    return dict(zip(NAMES, run_grammars(sglang_python, asked), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_as_the_template_writes_it_is_let_through_token_by_token(name, walked):
    tokenizer = load_tokenizer(name)
    for job in walked[name]:
        for ids, refused in zip(job["texts"], job["refused"], strict=True):
            assert refused is None, f"{refused}: {tokenizer.decode(ids[: refused[0] + 1])}"


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_sampled_under_the_grammar_is_one_call_that_fits_the_schema(name, walked):
    tokenizer, parser = load_tokenizer(name), parser_of(FAMILIES[name])
    stops = {tokenizer.convert_tokens_to_ids(stop) for stop in stops_of(FAMILIES[name])}
    for job in walked[name]:
        ended = [ids for ids in job["walks"] if ids[-1] in stops]  # random reasoning may go on and on
        assert ended or job["flags"]
        for ids in ended:
            text = tokenizer.decode(ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            reasoning_open = job["flags"].get("reasoning_open", False)
            assert not wrong_with(parser.parse_turn(text, tools=TOOLS, reasoning_open=reasoning_open), job["names"])


def test_every_registered_format_can_be_forced():
    assert set(TOOL_PARSER_REGISTRY.values()) == set(CALL_FORMATS)
    assert {type(parser_of(FAMILIES[name])) for name in NAMES} == set(CALL_FORMATS)


SHORT_TOOLS = [
    {
        "name": "convert",
        "description": "Converts a length.",
        "inputSchema": {
            "json": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 999},
                    "unit": {"enum": ["km", "mile"]},
                    "note": {"type": "string", "maxLength": 8},
                },
                "required": ["value", "unit", "note"],
            }
        },
    },
    TOOLS[1],
]


async def sample(server, choice, format_name, *, count=4, bias=0, **flags):
    """Force calls on a server that knows nothing of the format; `bias` makes the end of reasoning likelier."""
    template = ChatTemplate(get_tokenizer(str(server.model_path)), chat_template=server.chat_template)
    parser = get_tool_parser(format_name)
    prompt = template.opening([{"role": "user", "content": "How far is it?"}], to_chat_tools(SHORT_TOOLS)).token_ids
    if flags.get("reasoning_open"):
        prompt = prompt + template.encode(parser.think_start_token)
    params = {
        **(forced_call(parser, SHORT_TOOLS, choice, **flags) or {}),
        "max_new_tokens": 1500,
        "skip_special_tokens": False,
    }
    if bias:
        end_id = template.tokenizer.convert_tokens_to_ids(parser.think_end_token)
        params["logit_bias"] = {str(end_id): bias}
    async with SGLangClient(server.base_url) as client:
        answers = await asyncio.gather(*(client.generate(prompt, params, return_logprob=True) for _ in range(count)))
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"stop"}, answers[0]["text"][-200:]
    texts = [template.decode(answer["output_ids"][:-1]) for answer in answers]
    return [parser.parse_turn(text, tools=SHORT_TOOLS, **flags) for text in texts]


@pytest.mark.parametrize("format_name", sorted(TOOL_PARSER_REGISTRY))
async def test_a_model_of_noise_calls_a_tool_in_any_format_when_it_has_to(tiny_server, own_server, format_name):
    for turn in await sample(tiny_server, {"any": {}}, format_name):
        assert not wrong_with(turn, ("convert", "now"), SHORT_TOOLS)


@pytest.mark.parametrize("choice", [{"any": {}}, {"tool": {"name": "now"}}, {"tool": {"name": "convert"}}])
async def test_a_language_model_calls_the_tool_that_it_has_to(smollm_server, own_server, choice):
    names = (choice["tool"]["name"],) if "tool" in choice else ("convert", "now")
    for turn in await sample(smollm_server, choice, "hermes"):
        assert not wrong_with(turn, names, SHORT_TOOLS)


async def test_reasoning_that_the_prompt_opened_is_finished_before_the_call(tiny_server, own_server):
    choice = {"tool": {"name": "convert"}}
    turns = await sample(tiny_server, choice, "hermes", count=10, bias=4, reasoning_open=True)
    for turn in turns:
        assert not wrong_with(turn, ("convert",), SHORT_TOOLS)
    assert any(turn.reasoning for turn in turns)  # with this bias, one in ten ends its reasoning with the first token


async def test_grammars_of_different_shapes_do_not_disturb_each_other_on_one_server(tiny_server, own_server):
    for format_name in ("hermes", "qwen_xml", "glm", "hermes", "gemma4", "qwen_xml"):
        begin = time.perf_counter()
        for turn in await sample(tiny_server, {"tool": {"name": "convert"}}, format_name, count=2):
            assert not wrong_with(turn, ("convert",), SHORT_TOOLS)
        assert time.perf_counter() - begin < 60
