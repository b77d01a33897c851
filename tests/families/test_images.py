"""Images through real processors, tokenizers and chat templates."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
import torch
from PIL import Image

from strands_sglang import SGLangDeadlineError, SGLangModel
from strands_sglang.messages import pictures_of, to_chat_messages
from strands_sglang.messages.content import UnsupportedContentError
from strands_sglang.templates.chat_template import ChatTemplate, SampledTurn
from strands_sglang.templates.image_tokens import TOKEN_KEYS, ImageProcessor, multimodal_train_inputs
from strands_sglang.testing import ScriptedSGLang
from support.agents import user
from support.families import load_template, load_tokenizer
from support.pages import ROOT, run_page
from support.vision import VISION_FAMILIES, image_block, load_processor, picture, png

FAMILIES = list(VISION_FAMILIES)
QWEN = [family for family in FAMILIES if family.startswith("qwen")]
RED, BLUE, GREEN = png(100, 150, "red"), png(200, 90, "blue"), png(64, 64, "green")


def setup(family, **arguments):
    processor = load_processor(family)
    template = ChatTemplate(processor.tokenizer, arguments=arguments)
    return processor, template, ImageProcessor(processor, template)


def chat(*messages):
    return to_chat_messages(list(messages), images=True)


def processed(processor, text, pictures):
    images = [Image.open(BytesIO(picture.data)) for picture in pictures]
    return processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_opening_is_expanded_as_by_the_processor(family):
    processor, template, images = setup(family)
    messages = chat(user("look:", image_block(RED), "and", image_block(BLUE)))
    pictures = pictures_of(messages)
    text = template.render(messages, add_generation_prompt=True)
    once = template.encode(text)
    ids, inputs = images.expand(once, text, pictures)
    reference = processed(processor, text, pictures)
    assert ids == reference["input_ids"][0].tolist()
    assert len(ids) > len(once)
    assert inputs.sent_ids.tolist() == once
    assert text.count(VISION_FAMILIES[family].image) == 2
    assert set(inputs.train_inputs) == set(reference) - TOKEN_KEYS
    assert all(torch.equal(inputs.train_inputs[key], reference[key]) for key in inputs.train_inputs)


@pytest.mark.parametrize("family", FAMILIES)
async def test_escaped_marks_of_an_image_are_counted_as_sent(family):
    processor = load_processor(family)
    server = ScriptedSGLang(processor.tokenizer, [])
    model = SGLangModel(
        tokenizer=processor.tokenizer, processor=processor, client=server.client(), escape_control_tokens=True
    )
    messages = [user(f"what is {VISION_FAMILIES[family].image}?", image_block(RED))]
    counted = await model.count_tokens(messages)
    prompt = model.chat_template.opening(chat(*messages), None)
    sent, _ = model.images.expand(prompt.token_ids, prompt.encoded, prompt.pictures)
    assert counted == len(sent) > len(prompt.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_expand_as_the_whole_conversation_does(family):
    processor, template, images = setup(family)
    first, answer = chat(user(image_block(RED), "what?")), {"role": "assistant", "content": "A color."}
    second = chat(user("and", image_block(BLUE), "or", image_block(GREEN)))
    opening = template.render(first, add_generation_prompt=True)
    whole = template.render([*first, answer, *second], add_generation_prompt=True)
    end = template.stops[0]
    sampled = template.encode("A color.")
    suffix = whole[whole.index("A color.") + len("A color.") :]
    assert suffix.startswith(end)
    ids, opening_inputs = images.expand(template.encode(opening), opening, pictures_of(first))
    added, suffix_inputs = images.expand(template.encode(suffix), suffix, pictures_of(second))
    ids += [*sampled, *added]
    pictures = [*pictures_of(first), *pictures_of(second)]
    reference = processed(processor, whole, pictures)
    assert ids == reference["input_ids"][0].tolist()
    joined = multimodal_train_inputs([opening_inputs, suffix_inputs])
    assert set(joined) == set(reference) - TOKEN_KEYS
    assert all(torch.equal(joined[key], reference[key]) for key in joined)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_continuation_omits_only_a_sampled_end_of_turn(family):
    _, template, images = setup(family)
    messages = chat(user("see", image_block(BLUE)))
    end = template.stops[0]
    prompt = template.continuation(
        SampledTurn(template.encode(f"ok{end}"), template.stop_ids[0]), messages, None, has_system=False
    )
    text = end + template.decode(prompt.token_ids)
    with_end, _ = images.expand(template.encode(text), text, pictures_of(messages))
    without, inputs = images.expand(prompt.token_ids, text, pictures_of(messages))
    assert [template.stop_ids[0], *without] == with_end
    assert inputs.sent_ids.tolist() == prompt.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_before_the_rendered_text_are_unchanged(family):
    _, template, images = setup(family)
    messages = chat(user(image_block(BLUE)))
    text = template.render(messages, add_generation_prompt=True)
    missing = template.encode("</think>")
    ids, inputs = images.expand([*missing, *template.encode(text)], text, pictures_of(messages))
    assert ids == [*missing, *images.expand(template.encode(text), text, pictures_of(messages))[0]]
    assert inputs.sent_ids.tolist() == [*missing, *template.encode(text)]


@pytest.mark.parametrize("family", QWEN)
def test_images_in_tool_results_follow_the_order_of_calls(family):
    processor, template, images = setup(family)

    def call(use_id):
        return {"toolUse": {"toolUseId": use_id, "name": "camera", "input": {}}}

    def result(use_id, *content):
        return {"toolResult": {"toolUseId": use_id, "status": "success", "content": list(content)}}

    messages = chat(
        user("take pictures"),
        {"role": "assistant", "content": [call("a"), call("b")]},
        user(
            "thanks", result("b", image_block(BLUE)), result("a", {"text": "one"}, image_block(RED)), image_block(GREEN)
        ),
    )
    pictures = pictures_of(messages)
    assert [entry.data for entry in pictures] == [RED, BLUE, GREEN]
    text = template.render(messages, add_generation_prompt=True)
    ids, _ = images.expand(template.encode(text), text, pictures)
    assert ids == processed(processor, text, pictures)["input_ids"][0].tolist()


@pytest.mark.parametrize("family", ["qwen3", "llama_3_1", "glm_4_6"])
def test_a_template_without_images_is_rejected_at_once(family):
    template = ChatTemplate(load_tokenizer(family))
    with pytest.raises(ValueError, match="processor= was given, but the chat template"):
        ImageProcessor(load_processor("qwen3_vl"), template)


def test_an_image_dropped_by_the_template_is_an_error():
    processor = load_processor("qwen3_vl")
    only_users = load_template("qwen3_vl").replace(
        "{{- '\\n<tool_response>\\n' }}\n        {%- if message.content is string %}",
        "{{- '\\n<tool_response>\\n' }}\n        {%- if message.content %}",
    )
    template = ChatTemplate(processor.tokenizer, chat_template=only_users)
    images = ImageProcessor(processor, template)
    messages = chat(
        user("go"),
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "a", "name": "camera", "input": {}}}]},
        user({"toolResult": {"toolUseId": "a", "status": "success", "content": [image_block()]}}),
    )
    text = template.render(messages, add_generation_prompt=True)
    with pytest.raises(UnsupportedContentError, match=r"messages\[2\].content\[0\].toolResult.content\[0\]: .* drops"):
        images.expand(template.encode(text), text, pictures_of(messages))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_placeholder_in_the_text_is_an_error(family):
    _, template, images = setup(family)
    messages = chat(user(f"what does {VISION_FAMILIES[family].image} mean?", image_block()))
    text = template.render(messages, add_generation_prompt=True)
    with pytest.raises(UnsupportedContentError, match=r"messages\[0\].content\[1\]: the text holds"):
        images.expand(template.encode(text), text, pictures_of(messages))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampled_placeholder_is_rejected_before_sending(family):
    _, template, images = setup(family)
    messages = chat(user(image_block()))
    text = template.render(messages, add_generation_prompt=True)
    ids, inputs = images.expand(template.encode(text), text, pictures_of(messages))
    assert len(images.request_fields(inputs.sent_ids.tolist(), [inputs])["image_data"]) == 1
    sampled = template.encode(VISION_FAMILIES[family].image)
    with pytest.raises(UnsupportedContentError, match="the model sampled one"):
        images.request_fields([*inputs.sent_ids, *sampled], [inputs])


@pytest.mark.parametrize("family", QWEN)
def test_a_template_that_numbers_images_is_recognized(family):
    assert setup(family)[2].numbered is False
    assert setup(family, add_vision_id=True)[2].numbered is True


def test_a_processor_with_another_tokenizer_is_rejected():
    template = ChatTemplate(load_processor("gemma_3").tokenizer)
    images = ImageProcessor(load_processor("qwen3_vl"), template)
    text = template.render(chat(user(image_block())), add_generation_prompt=True)
    with pytest.raises(ValueError, match="have different tokenizers"):
        images.expand(template.encode(text), text, [picture()])


def test_invalid_image_data_is_an_error_with_its_path():
    _, template, images = setup("qwen3_vl")
    messages = chat(user("look", image_block(b"not a picture")))
    text = template.render(messages, add_generation_prompt=True)
    with pytest.raises(UnsupportedContentError, match=r"messages\[0\].content\[1\]: the 13 bytes are not a readable"):
        images.expand(template.encode(text), text, pictures_of(messages))


def test_an_image_loses_alpha_and_rotation_as_on_the_server():
    _, template, images = setup("qwen3_vl")
    file = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.new("RGBA", (64, 200), (255, 0, 0, 128)).save(file, "PNG", exif=exif)
    messages = chat(user(image_block(file.getvalue())))
    text = template.render(messages, add_generation_prompt=True)
    _, inputs = images.expand(template.encode(text), text, pictures_of(messages))
    grid = inputs.train_inputs["image_grid_thw"][0].tolist()
    assert grid[1] > grid[2]  # taller than wide


async def test_the_wait_for_a_processor_ends_with_the_call_and_needs_no_thread_of_a_tool(monkeypatch):
    processor = load_processor("gemma_3")
    client = ScriptedSGLang(processor.tokenizer, []).client(deadline=0.5)
    client.servers[0].takes_images = True
    model = SGLangModel(tokenizer=processor.tokenizer, processor=processor, client=client)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    began, is_over = threading.Event(), threading.Event()
    tool = asyncio.create_task(asyncio.to_thread(is_over.wait, 20))

    def expand(*prompt):
        began.set()
        is_over.wait(20)

    monkeypatch.setattr(model.images, "expand", expand)
    try:
        with pytest.raises(SGLangDeadlineError):
            await anext(model.stream([user(image_block())]))
        assert began.is_set()
    finally:
        is_over.set()
        await tool


def test_the_guides_snippets_run(tmp_path, monkeypatch):
    processor, _, _ = setup("gemma_3")
    run_page(ROOT / "docs/guides/images.md", "google/gemma-3-4b-it", processor, tmp_path, monkeypatch)
