"""Continuations on real chat templates and tokenizers, against the full render of the same conversation."""

import gc
import time

import pytest

from strands_sglang.messages import to_chat_messages
from strands_sglang.templates.chat_template import CASES as TEMPLATE_CASES
from strands_sglang.templates.chat_template import ChatTemplate
from support.families import FAMILIES, load_tokenizer, require_families
from support.families.matrix import CASES, DOCUMENT, REFUSED, document, judge


@pytest.fixture(scope="module", autouse=True)
def fetched():
    require_families()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_continuation_is_what_the_full_render_has_behind_the_turn(family, case):
    verdict = judge(family, case)
    assert verdict.proven is ((family, case) not in REFUSED), verdict.reason


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_says_what_the_matrix_finds(family):
    check = ChatTemplate(load_tokenizer(family)).self_check()
    refused = {case for (name, case) in REFUSED if name == family and case in TEMPLATE_CASES}
    if "user turn" in refused:
        refused.add("cut turn")  # a user message is what follows a cut turn
    assert {case for case, reason in check.items() if reason} == refused


def test_the_self_check_costs_at_most_50_ms_of_cpu_in_every_family():
    tokenizers = {family: load_tokenizer(family) for family in FAMILIES}
    costs = {}
    gc.collect()
    gc.disable()  # a collection looks at all those vocabularies
    try:
        for family, tokenizer in tokenizers.items():
            ChatTemplate(tokenizer)  # compiles the template
            tries = []
            for _ in range(3):
                start = time.process_time()
                ChatTemplate(tokenizer)
                tries.append(time.process_time() - start)
            costs[family] = min(tries)
    finally:
        gc.enable()
    assert {family: cost for family, cost in costs.items() if cost > 0.050} == {}


def test_the_documented_matrix_is_what_the_matrix_finds():
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_results_have_the_ids_that_a_template_of_kimi_writes_into_the_calls():
    template = ChatTemplate(load_tokenizer("kimi_k2"))  # numbers the calls of each turn anew
    messages = []
    for step in range(2):
        call = {"toolUse": {"toolUseId": f"use{step}", "name": "look_up", "input": {"key": str(step)}}}
        result = {"toolUseId": f"use{step}", "status": "success", "content": [{"text": f"value {step}"}]}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [{"toolResult": result}]}]
    chat = to_chat_messages([{"role": "user", "content": [{"text": "Look."}]}, *messages], call_id=template.call_id)
    text = template.opening(chat, None).text
    assert text.count("<|tool_call_begin|>functions.look_up:0<|") == text.count("## Return of functions.look_up:0") == 2
