"""A15 (p29): what users hand in and what is saved later is JSON from the start, or refused before anything runs."""

import enum
import json
from array import array

import numpy as np
import pytest
import torch

from strands_sglang.json_values import plain


class Level(enum.IntEnum):
    HIGH = 3


class Adapter(str, enum.Enum):
    MATHS = "maths"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([1, 2]), [1, 2]),
        (np.array(0.5, dtype=np.float16), 0.5),
        (torch.tensor(2), 2),
        (torch.tensor([[0.5]]), [[0.5]]),
        (array("i", [1, 2]), [1, 2]),
        (Level.HIGH, 3),
        (Adapter.MATHS, "maths"),
        ({Adapter.MATHS: 1}, {"maths": 1}),
        ((1, "a", None, True), [1, "a", None, True]),
        ({5: -100.0, np.int32(6): 1, "x": {"y": (np.float32(2),)}}, {"5": -100.0, "6": 1, "x": {"y": [2.0]}}),
    ],
)
def test_values_of_numpy_and_torch_become_pythons(given, expected):
    value = plain(given, "x")
    assert value == expected and json.loads(json.dumps(value)) == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (float("nan"), "x is nan.*finite"),
        ({"a": [1, np.float32("inf")]}, r"x\['a'\]\[1\] is inf"),
        ({1, 2}, r"x is \{1, 2\} \(set\), which JSON cannot hold"),
        ({"a": object}, r"x\['a'\] is <class 'object'>"),
        (1 + 2j, "complex"),
        (b"bytes", "bytes"),
        ({None: 1}, "the key None"),
        ({True: 1}, "the key True"),
        (2**64, "64 bits"),
        ("\ud800", "no Unicode text"),
        ({"\ud800": 1}, "a key of x"),
    ],
)
def test_what_json_has_no_place_for_is_refused_by_its_place(given, message):
    with pytest.raises(ValueError, match=message):
        plain(given, "x")


def test_a_value_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested more than"):
        plain(endless, "x")
