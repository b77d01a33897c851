"""Faults that are planted by the formats of the files alone: the doctor finds each, and accuses no healthy specimen."""

import shutil
from random import Random

import pytest

from strands_sglang.cli import main
from support import specimens
from support.plants import EVALUATION_FAULTS, STEP_FAULTS, TRAJECTORY_FAULTS, WRITTEN_FAULTS

PLACES = 10
"""How often each fault is planted, every time in another place."""


@pytest.fixture(scope="module")
def healthy(chatml_tokenizer, tmp_path_factory):
    """A folder per specimen: two training steps, one of them with experts; an evaluation; trajectories."""
    folder = tmp_path_factory.mktemp("healthy")
    specimens.write_step(folder / "dense" / "step-000003", chatml_tokenizer, experts=False)
    specimens.write_step(folder / "experts" / "step-000003", chatml_tokenizer)
    specimens.write_evaluation(folder / "evaluation", chatml_tokenizer)
    specimens.write_trajectories(folder / "trajectories", chatml_tokenizer, 12)
    return folder


def examined(path, capsys):
    """Return the doctor's exit code and what it printed."""
    code = main(["doctor", str(path)])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("specimen", ["dense", "experts", "evaluation", "trajectories"])
def test_healthy_specimens_are_not_accused(healthy, capsys, specimen):
    code, told = examined(healthy / specimen, capsys)
    assert code == 0, told


CASES = [
    *(("dense", plant) for plant in (*TRAJECTORY_FAULTS.values(), *STEP_FAULTS.values())),
    *(("trajectories", plant) for plant in WRITTEN_FAULTS.values()),
    *(("evaluation", plant) for plant in EVALUATION_FAULTS.values()),
]


@pytest.mark.parametrize("specimen, plant", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_planted_fault_is_found(healthy, tmp_path, capsys, specimen, plant):
    random, missed, planted = Random(plant.__name__), [], 0
    for place in range(3 * PLACES):
        if planted == PLACES:
            break
        folder = tmp_path / str(place)
        shutil.copytree(healthy / specimen, folder)
        what = plant(folder, random)
        if what is None:
            continue
        planted += 1
        code, told = examined(folder, capsys)
        if code != 1:
            missed.append((what, code, told))
    assert not missed
    assert planted == PLACES
