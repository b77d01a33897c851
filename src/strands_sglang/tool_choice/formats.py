"""How each tool-call format writes a call, as a grammar; the counterpart of its parser."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..tool_parsers import (
    DeepSeekV3ToolParser,
    DeepSeekV4ToolParser,
    DeepSeekV31ToolParser,
    DeepSeekV32ToolParser,
    Gemma4ToolParser,
    GLMToolParser,
    GraniteToolParser,
    HarmonyToolParser,
    HermesToolParser,
    KimiK2ToolParser,
    KimiK3ToolParser,
    Llama3JSONToolParser,
    Llama4PythonicToolParser,
    MiniMaxM2ToolParser,
    MiniMaxM3ToolParser,
    MistralToolParser,
    Phi4ToolParser,
    QwenXMLToolParser,
    SeedOSSToolParser,
    SmolLM3ToolParser,
    ToolParser,
)
from .grammar import Element, constant_text, either, json_object, matching, members, optional, sequence
from .schemas import Property, Schema, alternatives, object_properties
from .values import (
    GEMMA,
    INDENTED_JSON,
    JSON,
    MINIMAX_M3,
    PYTHON,
    Notation,
    plain_value,
    values_by_type,
)

_SPACE = INDENTED_JSON.gap  # Granite 3's template indents its JSON


@dataclass(frozen=True)
class Call:
    """The call that is to be written.

    Attributes:
        parser: Reads it.
        name: The tool.
        schema: Of its arguments.
    """

    parser: ToolParser
    name: str
    schema: Schema

    def json(self, notation: Notation = JSON) -> Element:
        """Return what matches the arguments as JSON, or in another notation.

        Raises:
            NotImplementedError: There is no grammar for that.
        """
        if any(option.value.get("type") != "object" for option in alternatives(self.schema)):
            raise self.schema.unsupported("the arguments of a tool are an object")
        return notation.value(self.schema)

    def properties(self, key: str | None = None) -> list[Property]:
        """Return the parameters of the tool.

        Args:
            key: Pattern of the names that the format can write.

        Raises:
            NotImplementedError: The format cannot write one of the names, or the schema is not that of one object.
        """
        options = alternatives(self.schema)
        if len(options) != 1 or options[0].value.get("type") != "object":
            raise self.schema.unsupported("a grammar of this format needs the schema of a single object")
        properties = object_properties(options[0])
        for found in properties:
            if key is not None and re.fullmatch(key, found.name) is None:
                raise found.schema.unsupported(f"the format cannot write the parameter {found.name!r}")
        return properties


@dataclass(frozen=True)
class CallFormat:
    """A tool-call format.

    Attributes:
        write: Returns what matches a call with everything around it.
        before: Pattern of the white space that a model may write before a call.
        thought: What belongs to the mark that opens reasoning.
        after_reasoning: What stands between reasoning and call beside white space.
    """

    write: Callable[[Call], Element]
    before: str = r"\n{0,3}"
    thought: str = ""
    after_reasoning: str = ""


def _object(call: Call, arguments: str = "arguments") -> Element:
    return json_object({"name": constant_text(call.name), arguments: call.json()})


def _hermes(call: Call) -> Element:
    return sequence(f"{call.parser.tool_start_token}\n", _object(call), f"\n{call.parser.tool_end_token}")


def _qwen_xml(call: Call) -> Element:
    start, end = call.parser.tool_start_token, call.parser.tool_end_token
    excludes = ("</parameter>", "<parameter=", end)
    parameters = [
        (
            sequence(
                f"<parameter={found.name}>\n",
                plain_value(found.schema, excludes, python_spellings=True),
                "\n</parameter>\n",
            ),
            found.required,
        )
        for found in call.properties(r"[^>\n]+")
    ]
    # Nemotron's template ends the line behind a call.
    return sequence(f"{start}\n<function={call.name}>\n", members(parameters), f"</function>\n{end}", optional("\n"))


def _glm(call: Call) -> Element:
    start, end = call.parser.tool_start_token, call.parser.tool_end_token
    excludes = ("</arg_value>", "<arg_key>")
    line = optional("\n")  # in GLM-4.5 and GLM-4.6, not later
    parameters = [
        (
            sequence(
                f"<arg_key>{found.name}</arg_key>",
                line,
                "<arg_value>",
                plain_value(found.schema, excludes),
                "</arg_value>",
                line,
            ),
            found.required,
        )
        for found in call.properties(r"[^<\n]+")
    ]
    return sequence(f"{start}{call.name}", line, members(parameters), end)


def _seed_oss(call: Call) -> Element:
    start, end = call.parser.tool_start_token, call.parser.tool_end_token
    excludes = ("</parameter>", "<parameter=", "</function>")
    parameters = [
        (
            sequence(
                f"<parameter={found.name}>",
                plain_value(found.schema, excludes, python_spellings=True),
                "</parameter>\n",
            ),
            found.required,
        )
        for found in call.properties(r"[^<>\n]+")
    ]
    return sequence(f"{start}\n<function={call.name}>\n", members(parameters), f"</function>\n{end}")


def _minimax_m2(call: Call) -> Element:
    start, end = call.parser.tool_start_token, call.parser.tool_end_token
    excludes = ("</parameter>", "<parameter name=", "</invoke>")
    parameters = [
        (
            sequence(f'<parameter name="{found.name}">', plain_value(found.schema, excludes), "</parameter>\n"),
            found.required,
        )
        for found in call.properties(r'[^"\n]+')
    ]
    return sequence(f'{start}\n<invoke name="{call.name}">\n', members(parameters), f"</invoke>\n{end}")


def _minimax_m3(call: Call) -> Element:
    (token,) = MINIMAX_M3.excludes
    call.properties()
    return sequence(
        f'{call.parser.tool_start_token}\n{token}<invoke name="{call.name}">',
        call.json(MINIMAX_M3),
        f"{token}</invoke>\n{call.parser.tool_end_token}",
    )


def _deepseek_v3(call: Call) -> Element:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
    return sequence(
        call.parser.tool_start_token, head, call.json(), "\n```<｜tool▁call▁end｜>", call.parser.tool_end_token
    )


def _deepseek_v3_1(call: Call) -> Element:
    head = f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>"
    return sequence(call.parser.tool_start_token, head, call.json(), "<｜tool▁call▁end｜>", call.parser.tool_end_token)


def _deepseek_v3_2(call: Call) -> Element:
    start, end = call.parser.tool_start_token, call.parser.tool_end_token
    excludes = ("</｜DSML｜parameter>", "<｜DSML｜parameter", "</｜DSML｜invoke>")
    parameters = []
    for found in call.properties(r'[^"\n]+'):
        typed = values_by_type(found.schema, excludes)
        values = [sequence('true">', typed.pop("string"))] if "string" in typed else []
        values += [sequence('false">', either(typed.values()))] if typed else []
        opening = f'<｜DSML｜parameter name="{found.name}" string="'
        parameters.append((sequence(opening, either(values), "</｜DSML｜parameter>\n"), found.required))
    return sequence(f'{start}\n<｜DSML｜invoke name="{call.name}">\n', members(parameters), f"</｜DSML｜invoke>\n{end}")


def _kimi_k2(call: Call) -> Element:
    return sequence(
        f"{call.parser.tool_start_token}<|tool_call_begin|>functions.{call.name}:",
        matching("0|[1-9][0-9]{0,3}"),  # counts the calls of the conversation
        "<|tool_call_argument_begin|>",
        call.json(),
        f"<|tool_call_end|>{call.parser.tool_end_token}",
    )


def _kimi_k3(call: Call) -> Element:
    excludes = ("<|close|>argument<|sep|>", "<|open|>argument", "<|close|>call<|sep|>")
    parameters = []
    for found in call.properties():
        typed = values_by_type(found.schema, excludes)
        values = [sequence(f'{kind}"<|sep|>', value) for kind, value in typed.items()]
        opening = f'<|open|>argument key="{_escaped(found.name)}" type="'
        parameters.append((sequence(opening, either(values), "<|close|>argument<|sep|>"), found.required))
    return sequence(
        optional("<|open|>response<|sep|><|close|>response<|sep|>"),
        f'{call.parser.tool_start_token}<|open|>call tool="{call.name}" index="1"<|sep|>',
        members(parameters),
        f"<|close|>call<|sep|>{call.parser.tool_end_token}<|close|>message<|sep|>",
    )


def _escaped(attribute: str) -> str:
    return attribute.replace("&", "&amp;").replace('"', "&quot;")


def _harmony(call: Call) -> Element:
    recipient = f" to=functions.{call.name}"
    return sequence(
        either([f"<|channel|>commentary{recipient}", f"{recipient}<|channel|>commentary"]),
        either([" <|constrain|>json", " json"]),
        "<|message|>",
        call.json(),
    )


def _llama3_json(call: Call) -> Element:
    whole = _object(call, "parameters")
    return either(
        [whole, json_object({"type": '"function"', "name": constant_text(call.name), "parameters": call.json()})]
    )


def _llama4_pythonic(call: Call) -> Element:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", call.name) is None:
        raise call.schema.unsupported("the format cannot write the tool's name")
    arguments = [
        (sequence(f"{found.name}=", PYTHON.value(found.schema)), found.required)
        for found in call.properties(r"[A-Za-z_][A-Za-z0-9_]*")
    ]
    return sequence(f"[{call.name}(", members(arguments, ", "), ")]")


def _mistral(call: Call) -> Element:
    native_id = matching("[a-zA-Z0-9]{9}")
    listed = sequence(
        matching(" ?"),
        f'[{{"name": {constant_text(call.name)}, "arguments": ',
        call.json(),
        optional(sequence(', "id": "', native_id, '"')),
        "}]",
    )
    named = sequence(call.name, optional(sequence("[CALL_ID]", native_id)), "[ARGS]", call.json())
    return sequence(call.parser.tool_start_token, either([listed, named]))


def _gemma4(call: Call) -> Element:
    call.properties()
    return sequence(f"{call.parser.tool_start_token}call:{call.name}", call.json(GEMMA), call.parser.tool_end_token)


def _granite(call: Call) -> Element:
    listed = sequence(
        *("<|tool_call|>[", _SPACE, "{", _SPACE, f'"name": {constant_text(call.name)},', _SPACE, '"arguments": '),
        *(call.json(INDENTED_JSON), _SPACE, "}", _SPACE, "]"),
    )
    return either([_hermes(call), listed])


def _phi4(call: Call) -> Element:
    start, end = call.parser.tool_start_token, call.parser.tool_end_token
    plain = _object(call)
    typed = json_object({"type": '"function"', "function": plain})
    return either(
        [
            sequence(start, either([plain, sequence("[", either([plain, typed]), "]")]), end),
            sequence("functools[", plain, "]"),
        ]
    )


CALL_FORMATS: Mapping[type[ToolParser], CallFormat] = {
    HermesToolParser: CallFormat(_hermes),
    SmolLM3ToolParser: CallFormat(_hermes),
    QwenXMLToolParser: CallFormat(_qwen_xml),
    GLMToolParser: CallFormat(_glm),
    KimiK2ToolParser: CallFormat(_kimi_k2),
    KimiK3ToolParser: CallFormat(_kimi_k3, before=""),
    DeepSeekV3ToolParser: CallFormat(_deepseek_v3),
    DeepSeekV31ToolParser: CallFormat(_deepseek_v3_1),
    DeepSeekV32ToolParser: CallFormat(_deepseek_v3_2),
    DeepSeekV4ToolParser: CallFormat(_deepseek_v3_2),
    HarmonyToolParser: CallFormat(_harmony, before="", after_reasoning="<|start|>assistant"),
    Llama3JSONToolParser: CallFormat(_llama3_json, before=""),
    Llama4PythonicToolParser: CallFormat(_llama4_pythonic, before=""),
    MistralToolParser: CallFormat(_mistral, before=""),
    MiniMaxM2ToolParser: CallFormat(_minimax_m2),
    MiniMaxM3ToolParser: CallFormat(_minimax_m3),
    Gemma4ToolParser: CallFormat(_gemma4, before="", thought="thought\n"),
    GraniteToolParser: CallFormat(_granite),
    SeedOSSToolParser: CallFormat(_seed_oss),
    Phi4ToolParser: CallFormat(_phi4, before=""),
}
"""The formats by the parser that reads them; exactly that class, for a subclass may read something else."""
