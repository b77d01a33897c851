import base64
from array import array

import pytest

from strands_sglang import SGLangDecodingError
from strands_sglang.model.config import ModelConfig
from strands_sglang.model.request import check_answer
from strands_sglang.protocol.generation import Generation

ASKED = ModelConfig(return_routed_experts=True)


def generation(*, prompt_tokens=5, rows=8, width=6, finish_type="stop", **fields):
    experts = base64.b64encode(bytes(4 * rows * width)).decode()
    fields = {"routed_experts": experts, **fields}
    return Generation(array("i", [7, 8, 9, 2]), None, finish_type, prompt_tokens=prompt_tokens, **fields)


def test_routed_experts_that_fit_are_taken():
    check_answer(generation(), ASKED, 5, 5)
    check_answer(generation(prompt_tokens=15, rows=18), ASKED, 15, 6, parent=generation())


def test_routed_experts_that_are_missing_are_an_error():
    with pytest.raises(SGLangDecodingError, match="not returned.*--enable-return-routed-experts.*router drops"):
        check_answer(generation(routed_experts=None), ASKED, 5, 5)


@pytest.mark.parametrize("given", [{}, {"return_routed_experts": False}, {"return_routed_experts": None}])
def test_routed_experts_that_nobody_asked_for_may_be_missing(given):
    config, _ = ModelConfig.read(given)
    check_answer(generation(routed_experts=None), config, 5, 5)


def test_an_aborted_request_may_lack_them():
    check_answer(generation(routed_experts=None, finish_type="abort"), ASKED, 5, 5)


def test_another_number_of_ids_per_token_than_in_the_turn_before_is_an_error():
    with pytest.raises(SGLangDecodingError, match="3 ids .* per token and 6 for the turn before.* 18 tokens"):
        check_answer(generation(prompt_tokens=15, rows=18, width=3), ASKED, 15, 6, parent=generation())


@pytest.mark.parametrize("config", [ASKED, ModelConfig()])
def test_a_turn_before_that_told_nothing_is_no_measure(config):
    check_answer(generation(), config, 5, 5, parent=generation(routed_experts=None))


@pytest.mark.parametrize("details", [None, {"device": 4, "host": 0}, {"device": 4, "host": 0, "storage": 0}])
def test_rows_of_tokens_from_the_first_tier_of_the_cache_are_taken(details):
    check_answer(generation(meta_info={"cached_tokens_details": details}), ASKED, 5, 5)


@pytest.mark.parametrize("tiers", [{"host": 4}, {"host": 0, "storage": 4, "storage_backend": "file"}])
def test_rows_of_tokens_from_other_tiers_of_the_cache_are_an_error(tiers):
    answer = generation(meta_info={"cached_tokens_details": {"device": 0, **tiers}})
    with pytest.raises(SGLangDecodingError, match="tiers.*: 4.*--enable-hierarchical-cache"):
        check_answer(answer, ASKED, 5, 5)
    check_answer(answer, ModelConfig(), 5, 5)
