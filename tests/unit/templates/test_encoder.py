"""What is done with a tokenizer by its owner, in whatever thread, changes nothing that the library encodes."""

import copy
import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from strands import Agent
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from strands_sglang import SGLangModel
from strands_sglang.drift import measure_drift
from strands_sglang.templates.chat_template import ChatTemplate, get_chat_template
from strands_sglang.templates.encoder import get_encoder
from strands_sglang.templates.images import ImageProcessor
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trajectory.tokens import TokenManager
from support.vision import picture

TEXT = "What is 17 times 23? Please use the calculator tool and tell me the result."


class ContestedTokenizer(PreTrainedTokenizerFast):
    """One whose owner, in another thread, gets in between always: after the settings of a call, before its text."""

    def set_truncation_and_padding(self, **settings):
        super().set_truncation_and_padding(**settings)
        strike = self.init_kwargs.get("strike")
        if strike is not None:
            strike()


@pytest.fixture(
    params=[
        lambda backend: backend.enable_truncation(max_length=4),
        lambda backend: backend.enable_padding(length=4000),
    ],
    ids=["truncate", "pad"],
)
def contested(request, chatml_tokenizer):
    tokenizer = ContestedTokenizer(
        tokenizer_object=copy.deepcopy(chatml_tokenizer.backend_tokenizer),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = chatml_tokenizer.chat_template
    tokenizer.init_kwargs["strike"] = lambda: request.param(tokenizer.backend_tokenizer)
    return tokenizer


def test_the_owner_does_get_in_between(contested, chatml_tokenizer):
    text = f"{TEXT}<|im_end|>"
    assert contested.encode(text) != chatml_tokenizer.encode(text)


# --- A1 ---


def test_prompts_are_whole_whatever_other_threads_do_with_the_tokenizer(contested, chatml_tokenizer):
    prompts = []
    for tokenizer in (contested, chatml_tokenizer):
        server = ScriptedSGLang(chatml_tokenizer, ["Let me see.", "It is 391."])
        model = SGLangModel(tokenizer=tokenizer, client=server.client())
        agent = Agent(model=model, callback_handler=None, system_prompt="Be brief.")
        agent(TEXT)
        agent(TEXT)
        assert len(model.trajectory.sequences()) == 1
        prompts.append([list(turn.prompt_ids) for turn in model.trajectory.turns])
    assert prompts[0] == prompts[1]


def test_two_templates_of_one_tokenizer_are_both_left_alone(contested, chatml_tokenizer):
    message = [{"role": "user", "content": TEXT}]
    for arguments in ({}, {"enable_thinking": False}):
        whole = get_chat_template(contested, None, arguments).opening(message, None)
        assert whole.token_ids == ChatTemplate(chatml_tokenizer, arguments=arguments).opening(message, None).token_ids


def test_drift_is_measured_on_whole_sequences(contested, chatml_tokenizer):
    sequence = TokenManager()
    sequence.add_prompt(chatml_tokenizer.encode(f"{TEXT}<|im_end|>"))
    assert measure_drift([sequence], contested).share_affected == 0.0


def test_the_scripted_server_answers_in_full(contested, chatml_tokenizer):
    server = ScriptedSGLang(contested, [TEXT])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    assert str(Agent(model=model, callback_handler=None)("Say it.")).strip() == TEXT


def test_many_threads_encode_at_once_while_the_owner_truncates(chatml_tokenizer):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    templates = [get_chat_template(tokenizer, None, {"enable_thinking": thinks}) for thinks in (True, False)]
    expected = chatml_tokenizer.encode(TEXT * 20)
    done = threading.Event()

    def own():
        while not done.is_set():
            tokenizer(TEXT, truncation=True, max_length=5)
            tokenizer(TEXT, padding="max_length", max_length=200)

    with ThreadPoolExecutor(5) as pool:
        owner = pool.submit(own)
        try:
            encoded = pool.map(lambda i: templates[i % 2].encode(TEXT * 20), range(400))
            assert all(ids == expected for ids in encoded)
        finally:
            done.set()
        owner.result()


def test_the_owner_s_settings_stay_as_they_are(chatml_tokenizer):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(max_length=7)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert get_encoder(tokenizer).encode(TEXT) == chatml_tokenizer.encode(TEXT)
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 7
    assert tokenizer.backend_tokenizer.padding["length"] == 9


# --- its own tokenizer ---


def test_models_of_one_tokenizer_share_an_encoder(chatml_tokenizer):
    assert get_encoder(chatml_tokenizer) is get_encoder(chatml_tokenizer)


def test_an_encoder_does_not_keep_the_tokenizer_alive(chatml_tokenizer):
    tokenizer = copy.copy(chatml_tokenizer)
    reference, encoder = weakref.ref(tokenizer), get_encoder(tokenizer)
    del tokenizer
    gc.collect()
    assert reference() is None
    assert encoder.decode(encoder.encode(TEXT)) == TEXT


def test_a_model_made_after_a_token_was_added_knows_it_and_an_earlier_one_stays_as_it_was(chatml_tokenizer):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    earlier = get_chat_template(tokenizer, None, {})
    before = earlier.encode("a<|note|>b")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|note|>"]})
    later = get_chat_template(tokenizer, None, {})
    token_id = tokenizer.convert_tokens_to_ids("<|note|>")
    assert token_id in later.encode("a<|note|>b")
    assert later.is_special(token_id)
    assert earlier.encode("a<|note|>b") == before


def test_a_model_made_after_named_templates_were_changed_uses_the_new_ones(chatml_tokenizer):
    tokenizer = copy.copy(chatml_tokenizer)
    for mark in ("first", "second"):
        tokenizer.chat_template = {"default": chatml_tokenizer.chat_template + mark}
        prompt = get_chat_template(tokenizer, None, {}).opening([{"role": "user", "content": "u"}], None)
        assert prompt.text.endswith(mark)


class SlowTokenizer:
    """One token per letter, in Python."""

    chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def __init__(self):
        self.shift = 0

    def encode(self, text, add_special_tokens=True, verbose=True):
        return [ord(letter) + self.shift for letter in text]

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=True):
        return "".join(chr(token_id - self.shift) for token_id in ids)


def test_a_tokenizer_in_python_is_copied_whole():
    tokenizer = SlowTokenizer()
    encoder = get_encoder(tokenizer)
    tokenizer.shift = 1
    assert encoder.encode("ab") == [97, 98]
    assert encoder.decode([97, 98]) == "ab"


def test_a_tokenizer_that_cannot_be_copied_is_used_as_it_is_with_a_warning(caplog):
    class Stubborn(SlowTokenizer):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle '_Stubborn' object")

    assert get_encoder(Stubborn()).encode("ab") == [97, 98]
    assert "cannot be copied" in caplog.text


def test_a_tokenizer_that_cannot_be_remembered_is_copied_each_time():
    class Unhashable(SlowTokenizer):
        __hash__ = None

    tokenizer = Unhashable()
    assert get_encoder(tokenizer).encode("a") == [97]
    assert get_encoder(tokenizer) is not get_encoder(tokenizer)


# --- images ---


def test_images_are_expanded_with_a_tokenizer_that_nobody_else_calls(contested, chatml_tokenizer):
    torch = pytest.importorskip("torch")

    class Processor:
        """Writes two end tokens for one image."""

        image_processor = object()

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def __call__(self, text, images, add_special_tokens, return_tensors):
            ids = self.tokenizer(text[0].replace("<|endoftext|>", "<|endoftext|>" * 2))["input_ids"]
            return {"input_ids": torch.tensor([ids]), "pixels": torch.ones(len(images), 3)}

    template_text = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ '<|endoftext|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(contested, chat_template=template_text)
    processor = Processor(contested)
    text = f"{TEXT}<|endoftext|><|im_end|>"
    ids, _ = ImageProcessor(processor, template).expand(template.encode(text), text, [picture()])
    assert ids == chatml_tokenizer.encode(f"{TEXT}<|endoftext|><|endoftext|><|im_end|>")
    assert processor.tokenizer is contested


# --- tokenizers of all kinds ---


def test_a_tokenizer_with_code_of_its_own_is_encoded_with_that_code(chatml_tokenizer):
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **settings):
            return super()._encode_plus(text.upper(), *args, **settings)

    tokenizer = Shouting(tokenizer_object=copy.deepcopy(chatml_tokenizer.backend_tokenizer))
    assert get_encoder(tokenizer).encode("abc") == chatml_tokenizer.encode("ABC")


def test_added_tokens_keep_their_ids(chatml_tokenizer):
    content = json.loads(chatml_tokenizer.backend_tokenizer.to_str())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": 1700, "content": "<|far|>"})
    content["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    encoder = get_encoder(tokenizer)
    ids = tokenizer.encode(f"{TEXT}<|far|>")
    assert encoder.encode(f"{TEXT}<|far|>") == ids
    assert encoder.tokenizer.added_tokens_decoder == tokenizer.added_tokens_decoder


def test_what_a_tokenizer_was_loaded_with_is_put_aside_but_its_splitting_of_control_tokens(chatml_tokenizer):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(chatml_tokenizer.backend_tokenizer), split_special_tokens=True
    )
    text = "a<|im_end|>b"
    assert get_encoder(tokenizer).encode(text) == tokenizer.encode(text) != chatml_tokenizer.encode(text)


def test_what_the_owner_changes_in_place_is_not_seen(chatml_tokenizer):
    """A1: transformers keeps special tokens in a dictionary, and parts of a tokenizer in Rust have settings, too."""
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = "{{ eos_token }}{{ messages[0].content }}"
    encoder = get_encoder(tokenizer)
    before = encoder.tokenizer.apply_chat_template([{"role": "user", "content": TEXT}])
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    tokenizer.backend_tokenizer.decoder = None
    assert encoder.tokenizer.apply_chat_template([{"role": "user", "content": TEXT}]) == before
    assert encoder.tokenizer.special_tokens_map == chatml_tokenizer.special_tokens_map
    assert encoder.encode("there") == chatml_tokenizer.encode("there")
    assert encoder.decode(encoder.encode(TEXT)) == TEXT


def test_parts_written_in_python_are_shared(chatml_tokenizer):
    class Words:
        def pre_tokenize(self, text):
            text.split(lambda _, words: words.split(" ", "isolated"))

    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Words())
    assert get_encoder(tokenizer).encode("a b") == tokenizer.encode("a b")
