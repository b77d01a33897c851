"""The README's table of an environment's limits."""

from __future__ import annotations

import inspect

from strands_env.core import Environment, TerminationReason
from support.readme import names_in_code, table


def test_the_table_of_limits_has_every_one_with_its_default() -> None:
    parameters = inspect.signature(Environment).parameters
    bounds = [name for name in parameters if name.startswith(("max_", "retr")) or name.endswith("_timeout")]
    rows = table("Environments", "Argument", "Default", "What it bounds")
    documented = {names_in_code(row["Argument"])[0]: row["Default"].strip("`") for row in rows}
    assert sorted(documented) == sorted(bounds)
    reasons = documented.pop("retry_on")
    assert parameters["retry_on"].default == (TerminationReason[reasons],)
    assert documented == {name: str(parameters[name].default) for name in documented}
