"""Images on a real server with a tiny random Qwen2.5-VL: what is recorded is what the server saw, and trains."""

import httpx
import pytest
import torch
from strands.types.exceptions import MaxTokensReachedException
from transformers import Qwen2_5_VLForConditionalGeneration

from strands_sglang import SGLangClient, SGLangModel, get_tokenizer
from strands_sglang.messages.content import UnsupportedContentError
from strands_sglang.tool_parsers import ToolParser
from support.agents import make_agent
from support.vision import image_block, load_without_videos, png

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    f"{{{{- '{IMAGE}' if part.type == 'image' else part.text }}}}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


class NoToolCalls(ToolParser):
    """Takes whatever was sampled for text."""

    def parse(self, text):
        return []


@pytest.fixture
def model(tiny_vl_server):
    tokenizer = get_tokenizer(str(tiny_vl_server.model_path))
    return SGLangModel(
        tokenizer=tokenizer,
        base_url=tiny_vl_server.base_url,
        processor=load_without_videos("Qwen2_5_VLProcessor", tiny_vl_server.model_path, tokenizer),
        chat_template=TEMPLATE,
        tool_parser=NoToolCalls(),
        # Sampled marks of images would end the conversation; a random model samples anything.
        sampling_params={
            "max_new_tokens": 12,
            "ignore_eos": True,
            "logit_bias": {str(token): -100.0 for token in range(512, 516)},
        },
    )


async def converse(model):
    agent = make_agent(model, system_prompt="Look.")
    questions = [
        [{"text": "what is"}, image_block(png(100, 150, "red")), {"text": "this?"}],
        [{"text": "go on"}],
        [image_block(png(200, 90, "blue")), image_block(png(64, 64, "green"))],
    ]
    for question in questions:
        with pytest.raises(MaxTokensReachedException):
            await agent.invoke_async(question)


async def test_a_conversation_with_images_is_one_sequence_that_the_server_saw_as_it_is_recorded(model):
    await converse(model)
    [sequence] = model.trajectory.sequences()
    assert [turn.generation.cached_tokens > 0 for turn in model.trajectory.turns[1:]] == [True, True]
    grid = sequence.multimodal_train_inputs["image_grid_thw"]
    pad = model.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert len(grid) == 3
    assert sequence.token_ids.count(pad) == int(grid.prod(dim=1).sum()) // 4


async def test_the_sampled_logprobs_are_those_of_the_recorded_tokens_and_tensors(model, tiny_vl_server):
    await converse(model)
    [sequence] = model.trajectory.sequences()
    policy = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_vl_server.model_path, dtype=torch.float32).eval()
    pad = model.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids = torch.tensor([sequence.token_ids])
    with torch.no_grad():
        logits = policy(input_ids=ids, mm_token_type_ids=(ids == pad).int(), **sequence.multimodal_train_inputs).logits[
            0
        ]
    trained = torch.tensor(sequence.loss_mask).bool()[1:]
    logits[:, 512:516] -= 100.0
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    recorded = torch.tensor([logprob or 0.0 for logprob in sequence.logprobs])[1:]
    assert int(trained.sum()) == 36
    assert torch.allclose(logprobs[trained], recorded[trained], atol=2e-3)


async def test_a_text_model_is_refused_before_anything_is_sent(tiny_server, tiny_vl_server):
    tokenizer = get_tokenizer(str(tiny_vl_server.model_path))
    requests = []

    async def noted(request):
        requests.append(request.url.path)
        return await httpx.AsyncHTTPTransport(trust_env=False).handle_async_request(request)

    async with SGLangClient(tiny_server.base_url, transport=httpx.MockTransport(noted)) as client:
        model = SGLangModel(
            tokenizer=tokenizer,
            client=client,
            processor=load_without_videos("Qwen2_5_VLProcessor", tiny_vl_server.model_path, tokenizer),
            chat_template=TEMPLATE,
        )
        with pytest.raises(UnsupportedContentError, match=r"messages\[0\].content\[0\]: .*takes no images"):
            await make_agent(model).invoke_async([image_block()])
    assert "/generate" not in requests
