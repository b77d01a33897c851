"""Real chat templates and tokenizers of the model families, for tests.

They are fetched once with `python tests/support/families/fetch.py` and are not part of the
repository. Everything loads when first asked for and is kept for the process.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.families.table import FAMILIES, FAMILY_CASES, Family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "FAMILIES",
    "FAMILY_CASES",
    "Family",
    "families_directory",
    "load_template",
    "load_tokenizer",
    "require_families",
    "template_names",
]

HOW_TO_FETCH = "python tests/support/families/fetch.py fetches them (210 MB, under a minute)"


def families_directory() -> Path:
    """Return the folder with everything that was fetched.

    Raises:
        FileNotFoundError: It was not fetched yet; the message says how to.
    """
    from support.families.fetch import cache_directory, is_fetched

    if not is_fetched():
        raise FileNotFoundError(f"the real tokenizers and chat templates are not in the cache: {HOW_TO_FETCH}")
    return cache_directory()


def require_families() -> Path:
    """Return the folder with everything that was fetched; without it the test fails in CI and is skipped elsewhere."""
    try:
        return families_directory()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


def template_names() -> list[str]:
    """Return the names of all templates that were fetched, those of no family in the table included."""
    templates = families_directory() / "templates"
    return sorted(path.relative_to(templates).with_suffix("").as_posix() for path in templates.glob("*/*.jinja"))


@functools.cache
def load_template(name: str) -> str:
    """Return the text of a chat template.

    Args:
        name: Of a family ("qwen3"), or of the template itself ("llama_cpp/Kimi-K2-Thinking").
    """
    if name in FAMILIES:
        name = FAMILIES[name].template
    return (families_directory() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a family's tokenizer with its chat template. It is shared: `copy.copy` it before changing it.

    Args:
        name: Of the family.
    """
    family = FAMILIES[name]
    tokenizer = copy.copy(
        _vocabulary(
            family.tokenizer,
            family.control_tokens,
            family.marks,
            family.eos_token or family.end_of_turn[0],
            family.bos_token,
        )
    )
    tokenizer.chat_template = load_template(name)
    return tokenizer


@functools.cache
def _vocabulary(
    name: str, control_tokens: tuple[str, ...], marks: tuple[str, ...], eos_token: str, bos_token: str | None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer without a chat template; families that share one share its megabytes."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(families_directory() / "tokenizers" / name / "tokenizer.json"),
        clean_up_tokenization_spaces=False,
    )
    for tokens, special in ((control_tokens, True), (marks, False)):
        added = [AddedToken(token, normalized=False, special=special) for token in tokens]
        tokenizer.add_tokens(added, special_tokens=special)
    tokenizer.eos_token = eos_token
    if bos_token is not None:
        tokenizer.bos_token = bos_token
    return tokenizer
