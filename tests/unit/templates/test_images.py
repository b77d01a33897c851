import base64
import subprocess
import sys

import httpx
import pytest
import torch

from strands_sglang.exceptions import SGLangDecodingError, SGLangHTTPError
from strands_sglang.messages.content import UnsupportedContentError
from strands_sglang.templates.images import (
    ImageInputs,
    ImageProcessor,
    check_prompt,
    data_uri,
    multimodal_train_inputs,
    require_image_understanding,
)
from strands_sglang.trajectory.tokens import TokenManager
from support.fake_server import OK, FakeServer
from support.vision import picture

IMAGE, PATCH = 7, 8


class Letters:
    """A processor, its tokenizer and its template: one token per letter, `#` for an image, which has two patches."""

    image_processor = object()

    def __init__(self, image="#"):
        self.image, self.tokenizer = image, self

    def encode(self, text, **options):
        return [IMAGE if letter == "#" else ord(letter) + 100 for letter in text]

    def render(self, messages, *, add_generation_prompt):
        contents = [message["content"] for message in messages]
        parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents]
        return "".join("".join(part.get("text", self.image) for part in one) + "|" for one in parts)

    def is_special(self, token_id):
        return token_id == IMAGE

    def __call__(self, text, images, add_special_tokens, return_tensors):
        ids = [patch for token in self.encode(text[0]) for patch in ([PATCH, PATCH] if token == IMAGE else [token])]
        mask = torch.ones(1, len(ids))
        return {"input_ids": torch.tensor([ids]), "attention_mask": mask, "pixels": torch.ones(2 * len(images), 3)}


def images():
    return ImageProcessor(Letters(), Letters())


def expanded(text, *pictures):
    return images().expand(Letters().encode(text), text, pictures)


# --- expansion ---


def test_a_prompt_without_images_stays_as_it_is():
    assert expanded("ab") == (Letters().encode("ab"), None)


def test_the_sent_form_is_kept_beside_the_expanded_one():
    ids, inputs = expanded("a#b", picture())
    assert ids == [197, PATCH, PATCH, 198]
    assert inputs.sent_ids.tolist() == [197, IMAGE, 198]
    assert list(inputs.train_inputs) == ["pixels"]


def test_the_bytes_of_a_picture_are_not_copied():
    one = picture()
    assert expanded("#", one)[1].pictures[0].data is one.data


@pytest.mark.parametrize(
    ("text", "complaint"), [("ab", "leaves images"), ("a#b##", r"the text holds.*\(3 placeholders for 1\)")]
)
def test_the_placeholders_must_be_those_of_the_images(text, complaint):
    with pytest.raises(UnsupportedContentError, match=f"messages.0.: .*{complaint}"):
        expanded(text, picture(where="messages[0]"))


def test_what_a_processor_complains_of_names_the_path():
    class Refusing(Letters):
        def __call__(self, **_):
            raise IndexError("too small")

    with pytest.raises(UnsupportedContentError, match=r"messages\[3\]: .*processor refuses.*too small"):
        ImageProcessor(Refusing(), Letters()).expand([IMAGE], "#", [picture(where="messages[3]")])


def test_something_else_than_a_processor_is_refused():
    with pytest.raises(ValueError, match=r"AutoProcessor.from_pretrained"):
        ImageProcessor(object(), Letters())


def test_a_template_without_a_mark_for_images_is_refused():
    with pytest.raises(ValueError, match="no control token for an image"):
        ImageProcessor(Letters(), Letters(image=""))


# --- requests ---


def test_the_images_of_all_turns_are_sent_in_order():
    first, second = picture(colour="red"), picture(colour="blue")
    turns = [expanded("#", first)[1], expanded("b#", second)[1]]
    fields = images().request_fields([IMAGE, 300, 198, IMAGE], turns)
    assert fields == {"image_data": [data_uri(first), data_uri(second)], "return_prompt_token_ids": True}


def test_a_conversation_without_images_sends_nothing():
    assert images().request_fields([1, IMAGE], []) == {}


def test_a_request_that_is_built_again_has_the_same_images():
    turns = [expanded("#", picture())[1]]
    assert images().request_fields([IMAGE], turns) == images().request_fields([IMAGE], turns)


def test_a_placeholder_without_an_image_is_refused():
    with pytest.raises(UnsupportedContentError, match="2 placeholders for 1 images"):
        images().request_fields([IMAGE, IMAGE], [expanded("#", picture())[1]])


async def test_every_attempt_sends_each_image_once():
    server = FakeServer(httpx.Response(503), httpx.Response(429), OK)
    fields = images().request_fields([IMAGE], [expanded("#", picture())[1]])
    async with server.client() as client:
        await client.generate([IMAGE], {"max_new_tokens": 1}, **fields)
    assert [body["image_data"] for body in server.bodies()] == [[data_uri(picture())]] * 3


@pytest.mark.parametrize(
    ("image_format", "kind"), [("png", "png"), ("jpeg", "jpeg"), ("jpg", "jpeg"), ("webp", "webp"), ("gif", "gif")]
)
def test_an_image_is_sent_as_a_data_uri(image_format, kind):
    one = picture()
    head, _, data = data_uri(type(one)(one.data, image_format, "")).partition(",")
    assert head == f"data:image/{kind};base64"
    assert base64.b64decode(data) == one.data


# --- the servers prompt ---


def test_the_recorded_prompt_passes():
    check_prompt({"prompt_token_ids": [1, 2]}, [1, 2])


def test_a_server_that_does_not_tell_passes():
    check_prompt({}, [1, 2])


@pytest.mark.parametrize("served", [[1, 3], [1], [1, 2, 3]])
def test_another_prompt_is_an_error_that_says_where_it_differs(served):
    with pytest.raises(SGLangDecodingError, match=r"not the recorded one from token [12] on"):
        check_prompt({"prompt_token_ids": served}, [1, 2])


def inputs(**tensors):
    return ImageInputs((), [], tensors)


# --- train inputs ---


def test_the_tensors_of_turns_are_joined_along_their_first_dimension():
    joined = multimodal_train_inputs(
        [inputs(pixels=torch.zeros(2, 3), grid=torch.tensor([[1, 2, 2]])), inputs(pixels=torch.ones(1, 3))]
    )
    assert joined["pixels"].tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]
    assert joined["grid"].tolist() == [[1, 2, 2]]


def test_turns_without_images_have_none():
    assert multimodal_train_inputs([]) is None


def test_tensors_that_cannot_be_joined_are_named():
    with pytest.raises(ValueError, match="pixels of several turns cannot be joined"):
        multimodal_train_inputs([inputs(pixels=torch.zeros(1, 3)), inputs(pixels=torch.zeros(1, 4))])


class TestServersThatTakeNoImages:
    async def ask(self, *answers, times=1):
        server = FakeServer(paths={"/model_info": answers[0], "/get_model_info": answers[-1]})
        async with server.client(max_retries=0) as client:
            for _ in range(times):
                await require_image_understanding(client, picture(where="messages[0]"))
        return len(server.asked)

    async def test_a_server_that_says_so_is_an_error(self):
        with pytest.raises(UnsupportedContentError, match=r"messages\[0\]: .*http://sglang.test:30000 takes no images"):
            await self.ask(httpx.Response(200, json={"has_image_understanding": False}))

    async def test_a_server_that_takes_them_is_asked_once(self):
        assert await self.ask(httpx.Response(200, json={"has_image_understanding": True}), times=3) == 1

    @pytest.mark.parametrize("answer", [httpx.Response(200, json={"model_path": "m"}), httpx.Response(404)])
    async def test_a_server_that_does_not_tell_may_be_asked_to_look(self, answer):
        await self.ask(answer)

    async def test_a_failure_is_not_remembered(self):
        server = FakeServer(paths={"/model_info": httpx.Response(500)})
        async with server.client(max_retries=0) as client:
            with pytest.raises(SGLangHTTPError):
                await require_image_understanding(client, picture())
            server.paths["/model_info"] = httpx.Response(200, json={"has_image_understanding": True})
            await require_image_understanding(client, picture())


def test_nothing_heavy_is_imported_until_an_image_comes():
    code = "import strands_sglang.templates.images, sys; print({'torch', 'PIL', 'transformers'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_an_episode_without_images_has_no_train_inputs_and_needs_no_torch(monkeypatch):  # A9
    monkeypatch.setitem(sys.modules, "torch", None)
    tokens = TokenManager()
    tokens.add_prompt([1, 2])
    assert tokens.multimodal_train_inputs is None
    assert multimodal_train_inputs([]) is None
