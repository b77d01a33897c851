import pytest

from strands_sglang.protocol.generation import read_generation
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang
from support.agents import make_agent

PROMPT = [11, 22, 33, 44, 55]
EXPERTS = ScriptedExperts(layers=3, experts=8, top_k=2)


async def generate(tokenizer, *, experts=EXPERTS, **fields):
    server = ScriptedSGLang(tokenizer, [ScriptedAnswer(token_ids=[7, 8, 9])], experts=experts)
    client = server.client()
    async with client:
        return await client.generate(PROMPT, {"max_new_tokens": 3}, **fields)


async def test_a_row_says_the_experts_of_each_token_but_the_last(chatml_tokenizer):
    response = await generate(chatml_tokenizer, return_routed_experts=True)
    ids = read_generation(response, logprobs_expected=False).expert_ids()
    assert ids.tolist() == [EXPERTS.chosen(i, token_id) for i, token_id in enumerate([*PROMPT, 7, 8])]


async def test_the_first_rows_can_be_left_out(chatml_tokenizer):
    whole = await generate(chatml_tokenizer, return_routed_experts=True)
    part = await generate(chatml_tokenizer, return_routed_experts=True, routed_experts_start_len=4)
    first = 4 * 4 * EXPERTS.layers * EXPERTS.top_k  # a multiple of 3 bytes, so that base64 can be cut there
    cut = whole["meta_info"]["routed_experts"][first * 4 // 3 :]
    assert part["meta_info"]["routed_experts"] == cut != ""


@pytest.mark.parametrize(("experts", "asked"), [(None, True), (EXPERTS, False)])
async def test_nothing_is_told_by_a_dense_model_or_to_those_who_do_not_ask(chatml_tokenizer, experts, asked):
    response = await generate(chatml_tokenizer, experts=experts, return_routed_experts=asked)
    assert "routed_experts" not in response["meta_info"]


async def test_the_rows_of_a_conversation_go_on_where_those_of_the_turn_before_ended(rollout):
    _, model = rollout(["one", "two"], server={"experts": EXPERTS}, return_routed_experts=True)
    agent = make_agent(model)
    await agent.invoke_async("a")
    await agent.invoke_async("b")
    first, second = (turn.generation.expert_ids() for turn in model.trajectory.turns)
    assert (second[: len(first)] == first).all()
    assert len(second) == len(model.token_manager) - 1


def test_experts_of_a_token_differ_within_a_layer():
    for position in range(50):
        chosen = EXPERTS.chosen(position, 7)
        assert all(0 <= expert < 8 for expert in chosen)
        assert all(chosen[i] != chosen[i + 1] for i in range(0, 6, 2))


@pytest.mark.parametrize("numbers", [{"layers": 0}, {"top_k": 0}, {"top_k": 9}])
def test_meaningless_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="top_k <= experts"):
        ScriptedExperts(**numbers)
