"""Model factories: functions that create the model of an episode, from arguments or from plain data.

Invalid arguments are errors when the factory is created, not at its first episode. Optional packages are imported when
a factory that needs them is created.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from strands.models.model import Model
from typing_extensions import override

from strands_sglang import SGLangClient, SGLangHTTPError, SGLangModel, get_client, get_tokenizer

from .identity import Identified, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Factory(Identified):
    """A model factory. It is pickled as the call that created it: what it has loaded or connected stays behind."""

    call: functools.partial[Any]
    served: Any = None
    kept: Any = None

    def __init__(self, make: Callable[[], Any], **facts: Any) -> None:
        self._make = make
        self._facts = describe(facts)

    def __call__(self) -> Any:
        return self._make()

    @override
    def identity(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._facts)

    def __reduce__(self) -> Any:
        return self.call, ()


P = ParamSpec("P")
F = TypeVar("F")


def _pickled_as_call(create: Callable[P, F]) -> Callable[P, F]:
    """Let the factories that a function creates remember its arguments."""

    @functools.wraps(create)
    def call(*args: P.args, **kwargs: P.kwargs) -> F:
        factory = create(*args, **kwargs)
        cast(_Factory, factory).call = functools.partial(call, *args, **kwargs)
        return factory

    return call


@_pickled_as_call
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
    """Create a factory of [`SGLangModel`][strands_sglang.SGLangModel]s, which record tokens.

    All models share one client and one tokenizer; each has its own configuration.

    Args:
        model_id: Name of the model, for logs and traces.
        tokenizer: Tokenizer of the served model, or its folder or name; None for `model_id`.
        client: Client that all models share. Exactly one of `client` and `base_url` is required.
        base_url: URL of an SGLang server, or several.
        sampling_params: SGLang's sampling parameters.
        tool_parser: Tool parser, as for `SGLangModel`.
        processor: Processor for images, as for `SGLangModel`.
        **config: Other options of `SGLangModel.SGLangConfig`.

    Returns:
        A function without arguments that creates a model.

    Raises:
        ValueError: Neither or both of `client` and `base_url` are given, the tokenizer is missing, or an option is
            unknown or invalid.
        OSError: The tokenizer does not exist.
    """
    tokenizer = tokenizer if tokenizer is not None else model_id
    if tokenizer is None:
        raise ValueError("pass tokenizer= (an object, a folder or a name) or model_id=")
    loaded: Any = get_tokenizer(tokenizer) if isinstance(tokenizer, str | PathLike) else tokenizer
    known = set(SGLangModel.SGLangConfig.__annotations__)
    if not known.issuperset(config):
        unknown = ", ".join(sorted(set(config) - known))
        raise ValueError(f"unknown configuration: {unknown}; the options are {', '.join(sorted(known))}")
    if model_id is not None:
        config["model_id"] = model_id

    def make() -> SGLangModel:
        # A copy for each model: an episode that changes its configuration must not affect others.
        params = None if sampling_params is None else {"sampling_params": dict(sampling_params)}
        return SGLangModel(
            tokenizer=loaded,
            client=client,
            base_url=base_url,
            tool_parser=tool_parser,
            processor=processor,
            **cast(Any, {**config, **(params or {})}),
        )

    first = make()  # validates the arguments
    facts = {"model_id": model_id, "tokenizer": tokenizer, "sampling_params": sampling_params}
    # The server's address is not part of the identity; its weights are, and `served` asks for them.
    factory = _Factory(make, backend="sglang", **facts, tool_parser=tool_parser, config=config)
    factory.served = functools.partial(served_weights, first.client)
    factory.kept = first  # models share the analysis of a chat template while one of them is alive
    return factory


async def served_weights(client: SGLangClient) -> dict[str, str]:
    """Ask an SGLang server which weights it serves.

    Args:
        client: Client of the server.

    Returns:
        `model_path` and `weight_version` of the server's `/model_info`, as far as it reports them; empty if the server
        has no such endpoint.

    Raises:
        SGLangClientError: The server does not answer.
    """
    try:
        info = await client.model_info()
    except SGLangHTTPError as error:
        if error.status not in (404, 405, 501):  # the endpoint exists
            raise
        return {}
    return {name: info[name] for name in ("model_path", "weight_version") if info.get(name) is not None}


@_pickled_as_call
def openai_model_factory(
    *,
    model_id: str,
    sampling_params: Mapping[str, Any] | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    client_args: Mapping[str, Any] | None = None,
    **config: Any,
) -> Callable[[], Model]:
    """Create a factory of Strands' `OpenAIModel`, for OpenAI and compatible servers. It records no tokens.

    Args:
        model_id: Name of the model.
        sampling_params: OpenAI's sampling parameters; `max_new_tokens` is an alias of `max_tokens`.
        base_url: URL of a compatible server, which usually ends in `/v1`; None for OpenAI.
        api_key: API key; None for the environment variable `OPENAI_API_KEY`.
        client_args: Other arguments of OpenAI's client.
        **config: Other options of `OpenAIModel`.

    Returns:
        A function without arguments that creates a model.

    Raises:
        ImportError: The `openai` extra is not installed.
        ValueError: `sampling_params` contains both a name and its alias.
    """
    try:
        from strands.models.openai import OpenAIModel
    except ImportError as error:
        raise ImportError("the openai package is not installed: pip install -e '.[openai]'") from error
    arguments = {**dict(client_args or {}), "base_url": base_url, "api_key": api_key}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    params = dict(config.pop("params", None) or {}) | _renamed(sampling_params, {"max_new_tokens": "max_tokens"})

    def factory() -> Model:
        return OpenAIModel(client_args=dict(arguments), model_id=model_id, params=dict(params), **config)

    factory()
    facts = {"model_id": model_id, "base_url": base_url, "sampling_params": params}
    return _Factory(factory, backend="openai", **facts, config=config)


@_pickled_as_call
def bedrock_model_factory(
    *,
    model_id: str,
    sampling_params: Mapping[str, Any] | None = None,
    boto_session: Any = None,
    boto_client_config: Any = None,
    region_name: str | None = None,
    **config: Any,
) -> Callable[[], Model]:
    """Create a factory of Strands' `BedrockModel`. It records no tokens.

    All episodes share one model, because its AWS client is expensive to create.

    Args:
        model_id: Bedrock's id of the model.
        sampling_params: `temperature`, `top_p`, `max_tokens` (or `max_new_tokens`), `stop_sequences` (or `stop`).
        boto_session: Session of boto3; None for a new one.
        boto_client_config: Configuration of botocore, for example to allow more than 10 connections.
        region_name: AWS region.
        **config: Other options of `BedrockModel`.

    Returns:
        A function without arguments that returns the model.

    Raises:
        ImportError: The `bedrock` extra is not installed.
        ValueError: Bedrock does not support a sampling parameter, or `sampling_params` contains both a name and its
            alias.
    """
    try:
        from strands.models.bedrock import BedrockModel
    except ImportError as error:
        raise ImportError("boto3 is not installed: pip install -e '.[bedrock]'") from error
    params = _renamed(sampling_params, {"max_new_tokens": "max_tokens", "stop": "stop_sequences"})
    unknown = set(params) - {"temperature", "top_p", "max_tokens", "stop_sequences"}
    if unknown:
        raise ValueError(f"Bedrock does not support the sampling parameters {', '.join(sorted(unknown))}")
    model = BedrockModel(
        boto_session=boto_session,
        boto_client_config=boto_client_config,
        region_name=region_name,
        **cast(Any, {"model_id": model_id, **params, **config}),
    )
    facts = {"model_id": model_id, "sampling_params": params}
    return _Factory(lambda: model, backend="bedrock", **facts, config=config)


def _renamed(params: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, Any]:
    given = dict(params or {})
    for name, other in names.items():
        if name in given:
            if other in given:
                raise ValueError(f"sampling_params contains both {name} and {other}, which mean the same")
            given[other] = given.pop(name)
    return given


# --- from plain data ---


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    sampling_params: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)


class SGLangFactoryConfig(_Plain):
    """Configuration of a model factory for an SGLang server. Unknown fields are errors.

    Attributes:
        sampling_params: SGLang's sampling parameters.
        config: Other options of `SGLangModel.SGLangConfig`.
        backend: Always `"sglang"`.
        base_url: URL of the server, or several.
        model_id: Name of the model, for logs and traces.
        tokenizer: Folder or name of the served model's tokenizer; None for `model_id`.
        tool_parser: Name of the tool parser; None for the default.
        client: Other arguments of [`SGLangClient`][strands_sglang.SGLangClient].
    """

    backend: Literal["sglang"]
    base_url: str | list[str] = "http://localhost:30000"
    model_id: str | None = None
    tokenizer: str | None = None
    tool_parser: str | None = None
    client: dict[str, Any] = Field(default_factory=dict)


class OpenAIFactoryConfig(_Plain):
    """Configuration of a model factory for OpenAI or a compatible server. Unknown fields are errors.

    Attributes:
        sampling_params: OpenAI's sampling parameters; `max_new_tokens` is an alias of `max_tokens`.
        config: Other options of `OpenAIModel`.
        backend: Always `"openai"`.
        model_id: Name of the model.
        base_url: URL of a compatible server; None for OpenAI.
        api_key: API key; None for the environment variable `OPENAI_API_KEY`.
        client: Other arguments of OpenAI's client.
    """

    backend: Literal["openai"]
    model_id: str
    base_url: str | None = None
    api_key: str | None = None
    client: dict[str, Any] = Field(default_factory=dict)


class BedrockFactoryConfig(_Plain):
    """Configuration of a model factory for Amazon Bedrock. Unknown fields are errors.

    Attributes:
        sampling_params: Sampling parameters, as for `bedrock_model_factory`.
        config: Other options of `BedrockModel`.
        backend: Always `"bedrock"`.
        model_id: Bedrock's id of the model.
        region_name: AWS region; None for boto3's default.
    """

    backend: Literal["bedrock"]
    model_id: str
    region_name: str | None = None


_FACTORY_CONFIG: TypeAdapter[SGLangFactoryConfig | OpenAIFactoryConfig | BedrockFactoryConfig] = TypeAdapter(
    Annotated[SGLangFactoryConfig | OpenAIFactoryConfig | BedrockFactoryConfig, Field(discriminator="backend")]
)


class ModelArgumentError(ValueError):
    """A configuration has an argument that its client or model refuses.

    Attributes:
        field: The field that holds the argument: "client" or "config".
    """

    def __init__(self, message: str, field: str = "config") -> None:
        """Name the field."""
        super().__init__(message)
        self.field = field


def build_model_factory(config: Mapping[str, Any]) -> Callable[[], Model]:
    """Create a model factory from plain data, such as the content of a configuration file.

    Args:
        config: `backend` (`"sglang"`, `"openai"` or `"bedrock"`) and the fields of
            [`SGLangFactoryConfig`][strands_env.core.models.SGLangFactoryConfig],
            [`OpenAIFactoryConfig`][strands_env.core.models.OpenAIFactoryConfig] or
            [`BedrockFactoryConfig`][strands_env.core.models.BedrockFactoryConfig].

    Returns:
        A function without arguments that returns a model.

    Raises:
        ValueError: The backend or a field is unknown, or a value is invalid.
        OSError: The tokenizer does not exist.
        ImportError: The backend's package is not installed.

    Examples:
        ```python
        factory = build_model_factory(
            {
                "backend": "sglang",
                "base_url": "http://localhost:30000",
                "tokenizer": "Qwen/Qwen3-4B-Instruct-2507",
                "sampling_params": {"temperature": 0.7},
                "config": {"enable_thinking": False},
            }
        )
        ```
    """
    try:
        read = _FACTORY_CONFIG.validate_python(dict(config))
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'][1:]) or 'backend'}: {problem['msg']}"
            if problem["loc"]
            else problem["msg"]
            for problem in error.errors()
        )
        raise ValueError(f"invalid model configuration: {reasons}") from error
    given = read.model_dump(exclude={"backend", "client", "config"})
    if isinstance(read, SGLangFactoryConfig):
        given["client"] = _made("client", get_client, {"base_url": given.pop("base_url")}, read.client)
    elif isinstance(read, OpenAIFactoryConfig):
        given["client_args"] = read.client
    factory: Callable[[], Model] = _made("config", _FACTORIES[read.backend], given, read.config)
    return factory


def _made(field: str, make: Callable[..., Any], given: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function; what only fails with the arguments of a field is their fault."""
    try:
        return make(**given, **arguments)
    except (TypeError, ValueError) as error:
        make(**given)
        raise ModelArgumentError(f"invalid model configuration: {error}", field) from error


_FACTORIES: Mapping[str, Callable[..., Callable[[], Model]]] = {
    "sglang": sglang_model_factory,
    "openai": openai_model_factory,
    "bedrock": bedrock_model_factory,
}
