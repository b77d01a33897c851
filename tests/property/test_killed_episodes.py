"""Episodes that are killed at random moments, with their server, and resumed: nothing is lost, doubled or mixed up.

KILLED_EPISODES=1000 python -m pytest tests/property/test_killed_episodes.py
"""

import json
import os
import subprocess
import sys

import pytest

from support import killing

KILLS = int(os.environ.get("KILLED_EPISODES", "50"))


@pytest.mark.timeout(max(300, 3 * KILLS))
def test_episodes_killed_at_random_moments_end_as_uninterrupted_ones():
    command = [sys.executable, killing.__file__, str(KILLS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["kills"] == KILLS
    assert not report["wrong"], report["wrong"]
    assert (report["lost"], report["twice"], report["identities"]) == (0, 0, 0)
    assert report["interrupted"] < report["episodes"] / 2
