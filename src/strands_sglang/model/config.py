"""The configuration of a model, checked when it is given, so that a mistake fails before the first call.

`SGLangModel.SGLangConfig` documents the keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..client.client import checked_routing_key
from ..json_values import plain
from ..protocol.wire import check_stops
from ..request_fields import REQUEST_FIELDS, check_sampling_mask, checked_fields

RENDERING_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "tokenizer_kwargs", "return_dict", "return_tensors", "return_assistant_tokens_mask"}
)
"""Arguments of `apply_chat_template` that choose what is rendered, not how."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "history_policy": ("append", "template"),
    "on_abort": ("raise", "resume"),
    "escape_control_tokens": (True, False),
    "random_seeds": (True, False),
}


def check_keys(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Reject unknown keys. They would have no effect, so the run would differ from the intended one.

    Raises:
        ValueError: A key is unknown. The message names the keys and what was probably meant.
    """
    unknown = sorted(set(config) - set(known))
    if not unknown:
        return
    close = {key: difflib.get_close_matches(key, known, n=1) for key in unknown}
    meant = [f"did you mean {names[0]!r} instead of {key!r}?" for key, names in close.items() if names]
    meant += [f"{key!r} belongs in request_fields" for key in unknown if key in REQUEST_FIELDS]
    hint = f" ({'; '.join(meant)})" if meant else ""
    raise ValueError(
        f"unknown configuration: {', '.join(map(repr, unknown))}{hint}; the keys are {', '.join(sorted(known))}. "
        "SGLang's sampling parameters (temperature, top_p, ...) belong in sampling_params"
    )


@dataclass(frozen=True)
class ModelConfig:
    """A checked configuration, with defaults for the keys that are None.

    `request_fields` holds all further fields of a request, including `unchecked_request_fields`.
    """

    model_id: str | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    return_logprob: bool = True
    return_prompt_logprobs: bool = False
    return_routed_experts: bool = False
    enable_thinking: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    family: str | None = None
    escape_control_tokens: bool = False
    history_policy: str = "append"
    on_abort: str = "raise"
    context_window_limit: int | None = None
    max_context_tokens: int | None = None
    routing_key: str | None = None
    random_seeds: bool = False
    request_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        """Whether to record the logprobs of sampled tokens; those of prompt tokens imply it."""
        return self.return_logprob or self.return_prompt_logprobs

    def own_sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters as objects of their own: a trainer's hook may change nested ones."""
        return _own(self.sampling_params)

    def own_request_fields(self) -> dict[str, Any]:
        """Return the further fields of a request as objects of their own."""
        return _own(self.request_fields)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_kwargs, **thinking}

    @property
    def rendering(self) -> tuple[str | None, dict[str, Any], str | None, bool]:
        """What prompts are rendered with: template, its arguments, family, and whether control tokens are escaped."""
        return self.chat_template, self.template_arguments, self.family, self.escape_control_tokens

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
        """Check a configuration whose keys are known.

        Returns:
            The checked configuration, and a copy of the given one.

        Raises:
            ValueError: A value would fail later, at the first call or when the episode is saved. The message names the
                key, its value and what it accepts.
        """
        params = given.get("sampling_params")
        if not isinstance(params, Mapping | None):
            raise ValueError(f"sampling_params must be a dict of SGLang's sampling parameters, not {params!r}")
        misplaced = sorted(set(params or ()) & set(REQUEST_FIELDS))
        if misplaced:
            raise ValueError(f"{misplaced} are fields of the request; put them in request_fields")
        template = given.get("chat_template")
        if template is not None and (not isinstance(template, str) or "{" not in template):
            raise ValueError(
                f"chat_template is the text of a Jinja template, not {template!r}; of a file pass Path(...).read_text()"
            )
        # A chat template may take arguments of any type.
        settings = {
            name: _own(value) if name == "chat_template_kwargs" else plain(value, name) for name, value in given.items()
        }
        values = {name: value for name, value in settings.items() if value is not None}
        values["request_fields"] = checked_fields(
            values.get("request_fields"), values.pop("unchecked_request_fields", None)
        )
        return cls(**values), settings

    def __post_init__(self) -> None:
        """Reject values that contradict each other or cannot work."""
        params = self.sampling_params
        check_sampling_mask(self.request_fields, params)
        check_stops(params)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {getattr(self, name)!r}")
        checked_routing_key(self.routing_key)
        reserved = RENDERING_ARGUMENTS & set(self.chat_template_kwargs)
        if reserved:
            raise ValueError(f"chat_template_kwargs cannot hold {sorted(reserved)}: the model sets them itself")
        least, most = params.get("min_new_tokens"), params.get("max_new_tokens")
        limits = {
            "sampling_params['max_new_tokens']": most,
            "context_window_limit": self.context_window_limit,
            "max_context_tokens": self.max_context_tokens,
        }
        for name, limit in limits.items():
            if limit is not None and not is_whole(limit, at_least=1):
                raise ValueError(f"{name} must be a whole number of at least 1 or None, not {limit!r}")
        if least is not None and not is_whole(least, at_least=0):
            raise ValueError(f"sampling_params['min_new_tokens'] must be a whole number of at least 0, not {least!r}")
        if least is not None and most is not None and least > most:
            raise ValueError(f"sampling_params ask for at least {least} and at most {most} new tokens")


def _own(value: Any) -> Any:
    """Copy dictionaries and lists, which their owner may change later; other objects stay as they are."""
    if type(value) is dict:
        return {name: _own(entry) for name, entry in value.items()}
    return [_own(entry) for entry in value] if type(value) is list else value


def is_whole(number: Any, *, at_least: int) -> bool:
    """Whether a value is a whole number that is large enough."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= at_least
