"""Model factories: what makes the model of an episode, from arguments or from plain data.

Arguments that cannot work are errors when the factory is made, not at its first episode. Providers whose packages are
extras are imported when a factory of theirs is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from strands.models.model import Model

from strands_sglang import SGLangClient, SGLangHTTPError, SGLangModel, get_client, get_tokenizer

from .identity import with_identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sglang_model_factory(
    *,
    model_id: str | None = None,
    tokenizer: PreTrainedTokenizerBase | str | PathLike[str] | None = None,
    client: SGLangClient | None = None,
    base_url: str | Sequence[str] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    tool_parser: Any = None,
    processor: Any = None,
    **config: Any,
) -> Callable[[], SGLangModel]:
    """A factory of `SGLangModel`s, which record tokens.

    Args:
        model_id: Name of the model, for logs and traces.
        tokenizer: The served model's, or its folder or name; by default that of `model_id`.
        client: The client that all of them share. Exactly one of `client` and `base_url` must be given.
        base_url: Address of an SGLang server, or of several.
        sampling_params: SGLang's sampling parameters.
        tool_parser: See `SGLangModel`, as for `processor`.
        processor: For images.
        **config: Further configuration, see `SGLangModel.SGLangConfig`.

    Raises:
        ValueError: Neither or both of `client` and `base_url`, no tokenizer, or what `SGLangModel` refuses.
        OSError: There is no such tokenizer.
    """
    tokenizer = tokenizer if tokenizer is not None else model_id
    if tokenizer is None:
        raise ValueError("tokenizer= must be given, as an object, a folder or a name; model_id= alone would do, too")
    loaded: Any = get_tokenizer(tokenizer) if isinstance(tokenizer, str | PathLike) else tokenizer
    known = set(SGLangModel.SGLangConfig.__annotations__)
    if not known.issuperset(config):
        raise ValueError(f"unknown configuration: {', '.join(sorted(set(config) - known))}")
    if model_id is not None:
        config["model_id"] = model_id

    def make() -> SGLangModel:
        # Each model has its own, so that an episode that changes the configuration changes no other's.
        params = None if sampling_params is None else {"sampling_params": dict(sampling_params)}
        return SGLangModel(
            tokenizer=loaded,
            client=client,
            base_url=base_url,
            tool_parser=tool_parser,
            processor=processor,
            **cast(Any, {**config, **(params or {})}),
        )

    first = make()  # refuses what cannot work

    def factory(*, kept: SGLangModel = first) -> SGLangModel:
        # Models share what is known of a chat template while one of them lives: `kept` does.
        return make()

    # Where the server is makes no difference, which weights it serves does: `served` asks it.
    with_identity(
        factory,
        backend="sglang",
        model_id=model_id,
        tokenizer=tokenizer,
        sampling_params=sampling_params,
        tool_parser=tool_parser,
        config=config,
    )
    factory.served = functools.partial(served_weights, first.client)  # type: ignore[attr-defined]
    return factory


async def served_weights(client: SGLangClient) -> dict[str, str]:
    """Which weights an SGLang server answers with, as it tells itself; nothing where it does not tell.

    Raises:
        SGLangClientError: The server gives no answer.
    """
    try:
        told = await client.model_info()
    except SGLangHTTPError as error:
        if error.status not in (404, 405, 501):  # there is such an endpoint
            raise
        return {}
    return {name: told[name] for name in ("model_path", "weight_version") if told.get(name) is not None}


def openai_model_factory(
    *,
    model_id: str,
    sampling_params: Mapping[str, Any] | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    client_args: Mapping[str, Any] | None = None,
    **config: Any,
) -> Callable[[], Model]:
    """A factory of Strands' `OpenAIModel`, for OpenAI and for servers with its interface; no tokens are recorded.

    Args:
        model_id: Name of the model.
        sampling_params: Its parameters in OpenAI's words; `max_new_tokens` is taken for `max_tokens`.
        base_url: Address of another server, which ends in /v1 as a rule.
        api_key: Its key; by default the environment's `OPENAI_API_KEY`.
        client_args: Further arguments of OpenAI's client.
        **config: Further configuration of `OpenAIModel`.

    Raises:
        ImportError: The package is not installed; says how to install it.
    """
    try:
        from strands.models.openai import OpenAIModel
    except ImportError as error:
        raise ImportError("OpenAI's package is missing: pip install 'strands-sglang[openai]'") from error
    arguments = {**dict(client_args or {}), "base_url": base_url, "api_key": api_key}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    params = dict(config.pop("params", None) or {}) | _renamed(sampling_params, {"max_new_tokens": "max_tokens"})

    def factory() -> Model:
        return OpenAIModel(client_args=dict(arguments), model_id=model_id, params=dict(params), **config)

    factory()
    return with_identity(
        factory, backend="openai", model_id=model_id, base_url=base_url, sampling_params=params, config=config
    )


def bedrock_model_factory(
    *,
    model_id: str,
    sampling_params: Mapping[str, Any] | None = None,
    boto_session: Any = None,
    boto_client_config: Any = None,
    region_name: str | None = None,
    **config: Any,
) -> Callable[[], Model]:
    """A factory of Strands' `BedrockModel`: one for all episodes, for its AWS client is costly; no tokens are recorded.

    Args:
        model_id: Bedrock's id of the model.
        sampling_params: `temperature`, `top_p`, `max_tokens` (or `max_new_tokens`), `stop_sequences` (or `stop`).
        boto_session: A session of boto3.
        boto_client_config: A configuration of botocore, e.g. for more connections than 10.
        region_name: AWS region.
        **config: Further configuration of `BedrockModel`.

    Raises:
        ImportError: The package is not installed; says how to install it.
        ValueError: A sampling parameter that Bedrock does not have.
    """
    try:
        from strands.models.bedrock import BedrockModel
    except ImportError as error:
        raise ImportError("boto3 is missing: pip install 'strands-sglang[bedrock]'") from error
    params = _renamed(sampling_params, {"max_new_tokens": "max_tokens", "stop": "stop_sequences"})
    unknown = set(params) - {"temperature", "top_p", "max_tokens", "stop_sequences"}
    if unknown:
        raise ValueError(f"Bedrock has no sampling parameters {', '.join(sorted(unknown))}")
    model = BedrockModel(
        boto_session=boto_session,
        boto_client_config=boto_client_config,
        region_name=region_name,
        **cast(Any, {"model_id": model_id, **params, **config}),
    )
    return with_identity(lambda: model, backend="bedrock", model_id=model_id, sampling_params=params, config=config)


def _renamed(params: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, Any]:
    given = dict(params or {})
    for name, other in names.items():
        if name in given:
            if other in given:
                raise ValueError(f"sampling_params has both {name} and {other}, which are the same")
            given[other] = given.pop(name)
    return given


# --- from plain data ---


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    sampling_params: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)


class SGLangFactoryConfig(_Plain):
    """An SGLang server. `client` has arguments of `SGLangClient`, `config` those of `SGLangModel.SGLangConfig`."""

    backend: Literal["sglang"]
    base_url: str | list[str] = "http://localhost:30000"
    model_id: str | None = None
    tokenizer: str | None = None
    tool_parser: str | None = None
    client: dict[str, Any] = Field(default_factory=dict)


class OpenAIFactoryConfig(_Plain):
    """OpenAI, or a server with its interface. `client` has arguments of its client."""

    backend: Literal["openai"]
    model_id: str
    base_url: str | None = None
    api_key: str | None = None
    client: dict[str, Any] = Field(default_factory=dict)


class BedrockFactoryConfig(_Plain):
    """Amazon Bedrock."""

    backend: Literal["bedrock"]
    model_id: str
    region_name: str | None = None


_FACTORY_CONFIG: TypeAdapter[SGLangFactoryConfig | OpenAIFactoryConfig | BedrockFactoryConfig] = TypeAdapter(
    Annotated[SGLangFactoryConfig | OpenAIFactoryConfig | BedrockFactoryConfig, Field(discriminator="backend")]
)


def build_model_factory(config: Mapping[str, Any]) -> Callable[[], Model]:
    """A model factory from plain data, as it comes from a file or a command line.

    Example:
        >>> build_model_factory({"backend": "sglang", "base_url": url, "tokenizer": path,
        ...                      "sampling_params": {"temperature": 0.7}, "config": {"enable_thinking": False}})

    Args:
        config: `backend` ("sglang", "openai" or "bedrock") and the fields of `SGLangFactoryConfig`,
            `OpenAIFactoryConfig` or `BedrockFactoryConfig`.

    Raises:
        ValueError: An unknown backend or field, a wrong value, or what the factory refuses.
        OSError: There is no such tokenizer.
        ImportError: The backend's package is not installed.
    """
    try:
        read = _FACTORY_CONFIG.validate_python(dict(config))
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(str(part) for part in one['loc'][1:]) or 'backend'}: {one['msg']}" if one["loc"] else one["msg"]
            for one in error.errors()
        )
        raise ValueError(f"the model's configuration cannot be used: {told}") from error
    try:
        given = read.model_dump(exclude={"backend", "client", "config"})
        if isinstance(read, SGLangFactoryConfig):
            return sglang_model_factory(client=get_client(given.pop("base_url"), **read.client), **given, **read.config)
        if isinstance(read, OpenAIFactoryConfig):
            return openai_model_factory(client_args=read.client, **given, **read.config)
        return bedrock_model_factory(**given, **read.config)
    except TypeError as error:  # of what is handed on: client and config
        raise ValueError(f"the model's configuration cannot be used: {error}") from error
