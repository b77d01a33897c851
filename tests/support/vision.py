"""Pictures, and real Hugging Face processors from local folders.

The image processors have their published parameters but for the sizes, which are small; tokenizers and chat templates
are those of the families.
"""

import copy
import functools
import io
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import transformers
from PIL import Image

from strands_sglang.messages.content import Picture
from support.families import families_directory, load_template, load_tokenizer


def png(width=100, height=150, color="red"):
    """The bytes of an image file."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def picture(width=100, height=150, color="red", where="here"):
    """A picture as `content` makes it of a block."""
    return Picture(png(width, height, color), "png", where)


def image_block(data=None, image_format="png"):
    """A Strands image block."""
    return {"image": {"format": image_format, "source": {"bytes": png() if data is None else data}}}


# A family whose models take images: the processor's class in transformers, and what the template writes for an image.
VisionFamily = namedtuple("VisionFamily", ["processor", "tokenizer", "template", "image"])

VISION_FAMILIES = {
    "qwen2_5_vl": VisionFamily(
        "Qwen2_5_VLProcessor", "qwen2_5", "trl/qwen2_5_vl", "<|vision_start|><|image_pad|><|vision_end|>"
    ),
    "qwen3_vl": VisionFamily("Qwen3VLProcessor", "qwen3_vl", "qwen3_vl", "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma_3": VisionFamily("Gemma3Processor", "gemma3", "gemma_3", "<start_of_image>"),
}


@functools.cache
def load_processor(name):
    """A family's processor, saved to a folder and loaded from there; skips where transformers lacks its class."""
    family = VISION_FAMILIES[name]
    if not hasattr(transformers, family.processor):
        pytest.skip(f"this transformers has no {family.processor}")
    with tempfile.TemporaryDirectory() as folder:
        return _load_gemma(Path(folder)) if name == "gemma_3" else _load_qwen(family, Path(folder))


def _load_gemma(folder):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(families_directory() / "tokenizers" / "gemma3" / "tokenizer.json"),
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = load_template("gemma_3")
    images = transformers.Gemma3ImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    transformers.Gemma3Processor(
        images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=16
    ).save_pretrained(folder)
    return transformers.AutoProcessor.from_pretrained(folder)


def load_without_videos(processor, folder, tokenizer):
    """One of Qwen's processors without its part for videos, which needs torchvision, and with any fast tokenizer.

    Args:
        processor: The name of its class.
        folder: Where the image processor was saved.
        tokenizer: Its tokenizer.
    """

    class WithoutVideos(getattr(transformers, processor)):
        def check_argument_for_proper_class(self, argument_name, argument):
            return type(argument)

    return WithoutVideos(transformers.AutoImageProcessor.from_pretrained(folder), tokenizer, None)


def _load_qwen(family, folder):
    patch = 16 if family.processor == "Qwen3VLProcessor" else 14
    # Few pixels, so that an image is a few dozen tokens.
    limits = {"min_pixels": (4 * patch) ** 2, "max_pixels": (16 * patch) ** 2}
    transformers.Qwen2VLImageProcessor(patch_size=patch, merge_size=2, **limits).save_pretrained(folder)
    tokenizer = copy.copy(load_tokenizer(family.tokenizer))
    tokenizer.chat_template = load_template(family.template)
    return load_without_videos(family.processor, folder, tokenizer)
