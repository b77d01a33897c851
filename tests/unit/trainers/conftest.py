from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.slime_episodes import tell_top_p


@pytest.fixture(scope="module")
def scripted_top_p() -> Iterator[None]:
    """Scripted servers tell the ids that top-p kept to requests that ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        tell_top_p(patch)
        yield
