"""Which tests need a machine that allows worlds."""

import pytest

from strands_env.sandbox import available_modes

WHY_NOT = available_modes()["namespaces"]
needs_worlds = pytest.mark.skipif(WHY_NOT is not None, reason=f"no worlds here: {WHY_NOT}")
