"""What a command line names, made: the environment's class, its reward and its model."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..core.models import SGLangFactoryConfig, build_model_factory, served_weights
from ..core.types import Action

ENVIRONMENTS = {
    "calculator": "strands_env.environments.CalculatorEnvironment",
    "python": "strands_env.environments.PythonEnvironment",
    "agentcore": "strands_env.environments.AgentCoreCodeEnvironment",
    "mcp": "strands_env.environments.MCPServersEnvironment",
}

REWARDS = {
    "math": "strands_env.rewards.MathReward",
    "exact": "strands_env.rewards.ExactMatchReward",
    "regex": "strands_env.rewards.RegexReward",
}

OWN_REWARD = "env"
"""The environment brings its own."""


def load_object(path: str, names: dict[str, str]) -> Any:
    """What a name or a dotted path (`package.module.Name`, or with `:` before the last part) stands for.

    Modules are also looked for in the current folder.

    Raises:
        ValueError: There is no such thing.
    """
    dotted = names.get(path, path).replace(":", ".")
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise ValueError(f"{path} is neither one of {', '.join(names)} nor a dotted path")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{module_name} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"{module_name} has no {name}")
    return getattr(module, name)


def model_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's configuration, as `build_model_factory` takes it.

    Raises:
        OSError: The chat template's file cannot be read.
        ValueError: An option is another backend's.
    """
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_new_tokens")}
    given = {
        "base_url": arguments.base_url,
        "model_id": arguments.model,
        "tokenizer": arguments.tokenizer,
        "tool_parser": arguments.tool_parser,
        "region_name": arguments.region,
        "client": arguments.client_args or None,
    }
    config = dict(arguments.model_args)
    if arguments.chat_template is not None:
        if arguments.backend != "sglang":
            raise ValueError("--chat-template goes with --backend sglang")
        config["chat_template"] = arguments.chat_template.read_text(encoding="utf-8")
    return {
        "backend": arguments.backend,
        **{name: value for name, value in given.items() if value is not None},
        "sampling_params": {
            **arguments.sampling_params,
            **{name: value for name, value in sampling.items() if value is not None},
        },
        "config": config,
    }


def run_config(arguments: argparse.Namespace, model: dict[str, Any]) -> dict[str, Any]:
    """What the results depend on: all of it but where the server is and how it is talked to."""
    return {
        "env": arguments.env,
        "env_args": arguments.env_args,
        "system_prompt": arguments.system_prompt,
        "reward": arguments.reward,
        # Left out where there are none, as in the files of releases that knew none.
        **({"reward_args": arguments.reward_args} if arguments.reward_args else {}),
        **{name: value for name, value in model.items() if name not in ("base_url", "client", "region_name")},
    }


async def served_model(model: dict[str, Any]) -> dict[str, Any]:
    """Which weights an SGLang server answers with, as it tells itself: results depend on them, too.

    Nothing for other backends, which are asked for a model by its name, and for servers that do not tell.

    Raises:
        SGLangClientError: The server gives no answer.
    """
    if model["backend"] != "sglang":
        return {}
    told = await served_weights(SGLangFactoryConfig.model_validate(model).shared_client())
    return {f"served_{name}": value for name, value in told.items()}


@dataclass(frozen=True)
class NamedEnvironment:
    """What `--env` and `--reward` name.

    Attributes:
        factory: Makes the environment of a sample.
        reward: Its reward function; None where that is not known before there is an environment.
    """

    factory: Callable[[Action], Awaitable[Any]]
    reward: Any


def named_environment(arguments: argparse.Namespace, model: dict[str, Any]) -> NamedEnvironment:
    """The environment that `--env` names.

    It is made with `model_factory`, `reward_fn` (unless it takes none, or `--reward env`), `system_prompt` if one is
    given, and `--env-args`.

    Raises:
        ValueError: It does not exist, or it or its reward refuses its arguments.
        TypeError: It refuses their names.
        ImportError: A package that it needs is missing.
    """
    target = load_object(arguments.env, ENVIRONMENTS)
    if not callable(target):
        raise ValueError(f"--env {arguments.env} is nothing that makes an environment")
    parameters = inspect.signature(target).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    given: dict[str, Any] = {"model_factory": build_model_factory(model), **arguments.env_args}
    if arguments.system_prompt is not None:
        given["system_prompt"] = arguments.system_prompt
    reward = _reward(arguments)
    if reward is not None and (takes_any or "reward_fn" in parameters):
        given["reward_fn"] = reward
    try:
        inspect.signature(target).bind(**given)
    except TypeError as error:
        raise ValueError(f"--env {arguments.env}: {error}") from error
    if inspect.isclass(target):
        reward = getattr(target(**given), "reward_fn", None)  # what it refuses is told now, and once

    async def factory(action: Action) -> Any:
        made = target(**given)
        return await made if inspect.isawaitable(made) else made

    return NamedEnvironment(factory, reward)


def _reward(arguments: argparse.Namespace) -> Any:
    """The reward that `--reward` names; None where the environment brings its own."""
    if arguments.reward == OWN_REWARD:
        if arguments.reward_args:
            raise ValueError("--reward-args goes with a --reward that is made here; an environment's own: --env-args")
        return None
    target = load_object(arguments.reward, REWARDS)
    try:
        return target(**arguments.reward_args)
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(f"--reward {arguments.reward}: {error}") from error
