"""A model as helpers use it: a judge, a writer of summaries, a guard, any agent whose answers are not to be trained.

Strands gives a provider no word on what a call is for, so an agent that judges looks like one that is trained. Whoever
makes the agent knows, and says so by the model that the agent gets. That holds in every thread, event loop and context,
and for helpers that Strands makes by itself from `Agent(aux_model=...)`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, TypeVar

from pydantic import BaseModel
from strands.models.model import Model
from strands.types.content import Messages
from strands.types.streaming import StreamEvent
from typing_extensions import override

T = TypeVar("T", bound=BaseModel)


class AuxiliaryModel(Model):
    """A view of a model: the same server, configuration and trajectory, and every call is auxiliary.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Model) -> None:
        """Look at a model, which must take `auxiliary=True` in `stream`."""
        self.model = model

    def __getattr__(self, name: str) -> Any:
        """What else there is of the model: its tokenizer, client, trajectory, configuration and so on."""
        if name == "model":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def auxiliary(self) -> AuxiliaryModel:
        """This."""
        return self

    @property
    def _supports_structured_output(self) -> bool:  # type: ignore[override]
        return self.model._supports_structured_output

    @property
    @override
    def stateful(self) -> bool:
        """As the model's."""
        return self.model.stateful

    @property
    @override
    def context_window_limit(self) -> int | None:
        """As the model's."""
        return self.model.context_window_limit

    @override
    async def count_tokens(self, *args: Any, **kwargs: Any) -> int:
        """As the model's `count_tokens`."""
        return await self.model.count_tokens(*args, **kwargs)

    @override
    def update_config(self, **model_config: Any) -> None:
        """Change the configuration of the model, for everybody."""
        self.model.update_config(**model_config)

    @override
    def get_config(self) -> Any:
        """The configuration of the model, as it is now."""
        return self.model.get_config()

    @override
    def stream(self, *args: Any, **kwargs: Any) -> AsyncIterable[StreamEvent]:
        """As the model's `stream`; the call is auxiliary."""
        return self.model.stream(*args, **{**kwargs, "auxiliary": True})

    @override
    def structured_output(
        self, output_model: type[T], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """As the model's `structured_output`, which is auxiliary in any case."""
        return self.model.structured_output(output_model, prompt, system_prompt, **kwargs)
