"""What of the TRL adapter needs no trainer; tests/trainers/trl has the rest."""

import httpx
import pytest
import torch

from strands_sglang import SGLangHTTPError
from strands_sglang.trainers.trl import SGLangWeights

TENSORS = [("weight", torch.zeros(3))]


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            httpx.Response(400, json={"success": False, "message": "shape mismatch"}),
            "http://two/update_.*shape mismatch",
        ),
        (
            httpx.Response(200, json={"success": False, "message": "shape mismatch"}),
            "http://two/update_.*shape mismatch",
        ),
        (httpx.Response(500, text="died"), "http://two/update_.*died"),
    ],
)
def test_weights_that_a_server_refuses_raise(respx_mock, refusal, message):
    for path in ("begin_weight_update", "end_weight_update"):
        respx_mock.post(path=f"/{path}").respond(404)
    respx_mock.post("http://one/update_weights_from_tensor").respond(json={"success": True})
    respx_mock.post("http://two/update_weights_from_tensor").mock(return_value=refusal)
    with pytest.raises(SGLangHTTPError, match=message):
        SGLangWeights(["http://one/", "http://two"]).push(TENSORS, 1)


def test_a_folder_needs_the_model_it_is_copied_from(tmp_path):
    with pytest.raises(ValueError, match="model_path and folder belong together"):
        SGLangWeights("http://localhost:1", folder=tmp_path)
