"""Trajectories as files: one safetensors file, bit-equal when read back, readable without this library.

Layout (format version 4). Tensors hold the concatenated tokens of all turns: `prompt_ids` and `output_ids` (int32),
`logprobs` (float64, of the sampled tokens) and `prompt_logprobs` (float64, of the turns that recorded them).
`routed_experts.<n>` (int32, rows x columns) belongs to turn n, if recorded. For turns with sampling masks,
`sampling_mask.ids` holds the ids of all rows and `sampling_mask.lengths` the row lengths (int32), and
`sampling_logprobs` (float64) their logprobs. The images of turn n's prompt are in `images.<n>.sent_ids` (int32, the
prompt with one placeholder per image), `images.<n>.file.<i>` (the bytes of image i) and `images.<n>.train.<name>` (the
processor's tensors; bfloat16 is stored as int16 and listed under `bfloat16` in the turn's description).

`pieces.ids` and `pieces.lengths` (int32) and `pieces.bytes` (uint8, all pieces end to end) hold the bytes of each id.

`trajectory` (uint8) is JSON. Its `turns` are in the order of their calls: `parent` is a position in that list, and
`prompt_tokens` and `sampled_tokens` count the turn's entries in the tensors. `said` and `answered` are the conversation
as people read it, and `text` of the `answer` is the text of the sampled ids. `reason` and `note` are lists: a kind of
`reasons.SENTENCES`, turn, position and details. Other keys hold what else the trajectory knows: `agents` and `helpers`
that have asked, `result_notices`, `call_ids`, `tool_parse_errors` and `tool_results` of tool calls, the `end` of the
episode, the `packages` and the `context_length` that it was recorded with, and the `id` that its forks share.
Digests are hexadecimal. The file's metadata holds `format`, `version`, and the `checksum` of all tensors. A file that
does not have its checksum is refused, except by the doctor and the viewer, which show what is there.

Earlier versions are read, too. Before version 4, reasons are sentences, and there may be seals, which are not read.
Version 2 may lack pieces, texts, `end` and the checksum, which covers no types and shapes there. Version 1 also has
`trajectory` in the metadata, which safetensors limits to 100 MB.
"""

from __future__ import annotations

import base64
import json
import math
import os
import secrets
import zlib
from array import array
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..messages.content import Picture
from ..outcomes import TerminationReason
from ..protocol.generation import FINISH_TYPES, Generation, SamplingMask, are_in_order, to_json
from ..reasons import Reason, read_reason
from ..shown import one_line
from ..templates.encoder import Encoder
from ..templates.image_tokens import ImageInputs
from .turn import RecordedError, Turn, TurnStatus, ids_in

FORMAT = "strands-sglang trajectory"
VERSION = "4"
_UNTYPED = ("1", "2")
_READABLE = (*_UNTYPED, "3", VERSION)
_METADATA = {"format", "version", "checksum", "trajectory"}

_TURN_FIELDS: tuple[str, ...] = (
    *("index", "reasoning_open", "constrained", "agent", "cycle", "is_auxiliary", "clamped", "parent_kept"),
    *("ends_in_reasoning", "has_reasoning", "sampling_params", "request_fields", "was_added", "said", "answered"),
)
"""Fields that files have as they are, and earlier ones may lack."""
_REQUIRED_FIELDS: tuple[str, ...] = (
    *("tool_calls", "roles", "status", "key", "parts", "digests", "answer_key", "answer_digest", "answer_blocks"),
)
"""Fields that all files have as they are; `why` and `fate` have other names there."""
_GENERATION_FIELDS: tuple[str, ...] = (
    *("finish_type", "stop_token_id", "stop_string", "abort_message", "prompt_tokens", "cached_tokens"),
    *("weight_version", "weight_versions", "request_id", "resumed_ids", "latency_s", "meta_info"),
)


class TrajectoryFileError(ValueError):
    """A file is not a trajectory, is damaged or was changed, or has a version that this library does not know."""


class DamagedTrajectoryError(TrajectoryFileError):
    """A file is a trajectory, but holds what no trajectory can."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn whatever a damaged file raises into one error.

    Args:
        name: Name of the file in errors.

    Raises:
        TrajectoryFileError: The file cannot be read.
    """
    try:
        yield
    except (ImportError, MemoryError):  # not the file's fault
        raise
    except TrajectoryFileError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    except Exception as error:
        raise DamagedTrajectoryError(f"{name}: damaged: {type(error).__name__}: {one_line(error, 200)}") from error


def encode_turns(
    turns: Sequence[Turn],
    facts: Mapping[str, Any],
    encoder: Encoder | None,
    known_pieces: Mapping[int, bytes],
) -> bytes:
    """Return the content of a file with these turns.

    Args:
        turns: The turns in the order of their calls, parents first.
        facts: Further JSON-like facts about the trajectory.
        encoder: Decodes the tokens; None if it is unknown.
        known_pieces: Text of ids that an earlier file had.

    Raises:
        TypeError: An image processor's tensor has a type that numpy lacks.
    """
    import numpy as np

    positions = {id(turn): position for position, turn in enumerate(turns)}
    tensors = _columns_of(turns)
    pieces = {**known_pieces, **_new_pieces(turns, encoder, known_pieces)}
    if pieces:
        tensors["pieces.ids"] = np.asarray(list(pieces), "<i4")
        tensors["pieces.lengths"] = np.asarray([len(piece) for piece in pieces.values()], "<i4")
        tensors["pieces.bytes"] = np.frombuffer(b"".join(pieces.values()), "uint8")
    described = []
    for position, turn in enumerate(turns):
        tensors.update(_own_tensors(turn, position))
        parent = None if turn.parent is None else positions[id(turn.parent)]
        described.append(_describe_turn(turn, parent, encoder))
    content = {"turns": described, **facts}
    tensors["trajectory"] = np.frombuffer(json.dumps(content, default=in_hex).encode(), "uint8")
    return pack(tensors, FORMAT, VERSION)


def turn_content(
    turn: Turn, parent: int | None, encoder: Encoder | None, known_pieces: Collection[int]
) -> tuple[dict[str, Any], dict[str, Any], dict[int, bytes]]:
    """Return the description of one turn, its tensors, and the text of its ids that are not known yet.

    Args:
        turn: The turn.
        parent: What names its parent.
        encoder: Decodes its tokens; None if it is unknown.
        known_pieces: The ids whose text is known.
    """
    tensors = {name: values for name, values in _parts_of(turn).items() if values is not None} | _own_tensors(turn, 0)
    return _describe_turn(turn, parent, None), tensors, _new_pieces([turn], encoder, known_pieces)


def decode_turn(described: Mapping[str, Any], tensors: Mapping[str, Any], turns: Mapping[int, Turn]) -> Turn:
    """Return the turn of which `turn_content` returned the description and the tensors.

    Args:
        described: The description.
        tensors: The tensors.
        turns: The earlier turns, by what names a parent.

    Raises:
        TrajectoryFileError: It is no turn, or not one of these.
    """
    reader = _Reader(tensors)
    turn = reader.turn(described, 0, turns)
    reader.check_end()
    return turn


def _parts_of(turn: Turn) -> dict[str, Any]:
    """Return what one turn adds to each column; None for nothing."""
    answer = turn.generation
    mask = None if answer is None else answer.sampling_mask
    return {
        "prompt_ids": turn.prompt_ids,
        "output_ids": turn.output_ids,
        "logprobs": None if answer is None else answer.logprobs,
        "prompt_logprobs": turn.prompt_logprobs,
        "sampling_mask.ids": None if mask is None else mask.token_ids,
        "sampling_mask.lengths": None if mask is None else mask.lengths,
        "sampling_logprobs": None if answer is None else answer.sampling_logprobs,
    }


def _columns_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the tensors with the tokens of turns, end to end."""
    import numpy as np

    parts = [*map(_parts_of, turns)]
    tensors: dict[str, Any] = {}
    for name in _COLUMNS:
        kind = _type_of(name)
        values = [np.asarray(part[name], dtype=kind) for part in parts if part[name] is not None]
        if values or not name.startswith("sampling"):
            tensors[name] = np.concatenate([np.zeros(0, kind), *values])
    return tensors


def _own_tensors(turn: Turn, position: int) -> dict[str, Any]:
    """Return the tensors that one turn has for itself: its routed experts and its images."""
    import numpy as np

    tensors: dict[str, Any] = {}
    experts = None if turn.generation is None else turn.generation.expert_ids()
    if experts is not None:
        tensors[f"routed_experts.{position}"] = np.ascontiguousarray(experts)
    if turn.images is not None:
        tensors.update(_image_tensors(turn.images, f"images.{position}."))
    return tensors


def _new_pieces(turns: Iterable[Turn], encoder: Encoder | None, known: Collection[int]) -> dict[int, bytes]:
    """Return the text of the ids in some turns that is not known yet."""
    return {} if encoder is None else encoder.pieces(sorted(ids_in(turns).difference(known)))


def pack(tensors: Mapping[str, Any], form: str, version: str) -> bytes:
    """Return the content of a file with these tensors, and their checksum."""
    from safetensors.numpy import save

    metadata = {"format": form, "version": version, "checksum": _checksum(tensors)}
    return bytes(save(dict(tensors), metadata=metadata))


def unpack(
    content: bytes, form: str, readable: Sequence[str], *, changed_too: bool = False
) -> tuple[dict[str, Any], Mapping[str, str], bool]:
    """Return the tensors and the metadata of a file, and whether it was changed since it was written.

    Args:
        content: Content of the file.
        form: Its format.
        readable: Versions of the format that can be read.
        changed_too: Whether to read a file that was changed.

    Raises:
        TrajectoryFileError: The content is of another format or version, or was changed.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise TrajectoryFileError(f"not a safetensors file, or truncated: {error}") from error
    except KeyError as error:  # bfloat16, which NumPy does not have
        raise TrajectoryFileError(f"not {form!r}: it has tensors of type {error}") from error
    metadata = _metadata_of(content)
    version, checksum = metadata.get("version", ""), metadata.get("checksum")
    if metadata.get("format") != form or version not in readable:
        found = f"{metadata.get('format')!r}, version {version!r}"
        raise TrajectoryFileError(f"holds {found}, not {form!r}, version {' or '.join(readable)}")
    is_unchecked = checksum is None and version in _UNTYPED and _METADATA.issuperset(metadata)
    is_changed = not is_unchecked and checksum != _checksum(tensors, version)
    if is_changed and not changed_too:
        raise TrajectoryFileError(
            "changed since it was written: its checksum does not fit. Use another copy of the file; "
            "`strands-sglang doctor` tells what contradicts itself in this one"
        )
    return tensors, metadata, is_changed


def _image_tensors(images: ImageInputs, prefix: str) -> dict[str, Any]:
    import numpy as np

    tensors: dict[str, Any] = {f"{prefix}sent_ids": np.asarray(images.sent_ids, dtype="<i4")}
    for i, picture in enumerate(images.pictures):
        tensors[f"{prefix}file.{i}"] = np.frombuffer(picture.data, dtype="uint8")
    for name, values in images.train_inputs.items():
        if _is_bfloat16(values):
            import torch

            values = values.view(torch.int16)
        tensors[f"{prefix}train.{name}"] = np.ascontiguousarray(values)
    return tensors


def _describe_turn(turn: Turn, parent: int | None, encoder: Encoder | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        **{name: getattr(turn, name) for name in (*_TURN_FIELDS, *_REQUIRED_FIELDS)},
        "parent": parent,
        "reason": turn.why,
        "note": turn.fate,
        "cause": turn.failure,
        "cause_outcome": turn.failure_outcome,
        "prompt_tokens": len(turn.prompt_ids),
        "has_prompt_logprobs": turn.prompt_logprobs is not None,
        "images": None,
        "bfloat16": [],
        "answer": None,
    }
    images, answer = turn.images, turn.generation
    if images is not None:
        described["images"] = [{"format": picture.format, "where": picture.where} for picture in images.pictures]
        described["bfloat16"] = [name for name, values in images.train_inputs.items() if _is_bfloat16(values)]
    if answer is not None:
        text = turn.text
        if text is None and encoder is not None:
            text = encoder.decode(answer.output_ids)
        described["answer"] = {
            **{name: getattr(answer, name) for name in _GENERATION_FIELDS},
            "sampled_tokens": len(answer.output_ids),
            "text": text,
            "has_logprobs": answer.logprobs is not None,
            "has_sampling_mask": answer.sampling_mask is not None,
            "has_sampling_logprobs": answer.sampling_logprobs is not None,
            "is_resumed": turn.waits_to_go_on,
        }
    return described


def in_hex(value: Any) -> str:
    """Return a digest as JSON has it; raise what `json` does for anything else."""
    return value.hex() if isinstance(value, bytes) else json.JSONEncoder().default(value)


def _checksum(tensors: Mapping[str, Any], version: str = VERSION) -> str:
    """Return the CRC-32 of all tensors in the order of their names, as 8 hexadecimal digits.

    Each tensor follows its name and, since version 3, its type and shape.
    """
    crc = 0
    for name in sorted(tensors):
        values = tensors[name]
        head = f"{name} {values.dtype.str} {values.shape}" if version not in _UNTYPED else name
        crc = zlib.crc32(values.tobytes(), zlib.crc32(head.encode(), crc))
    return f"{crc:08x}"


def decode_turns(content: bytes, *, changed_too: bool = False) -> tuple[list[Turn], dict[str, Any], dict[int, bytes]]:
    """Read the turns of a file, the further facts about its trajectory, and the text of its ids.

    Use it inside `reading`: a damaged description may raise anything.

    Args:
        content: Content of the file.
        changed_too: Whether to read a file that was changed.

    Raises:
        TrajectoryFileError: The content is not a trajectory, was changed, or has an unknown version.
    """
    tensors, metadata, is_changed = unpack(content, FORMAT, _READABLE, changed_too=changed_too)
    recorded = json.loads(metadata["trajectory"] if "trajectory" in metadata else tensors["trajectory"].tobytes())
    recorded["is_changed"] = is_changed
    reader = _Reader(tensors)
    turns: dict[int, Turn] = {}
    latest = -1
    for position, described in enumerate(recorded.pop("turns")):
        turn = turns[position] = reader.turn(described, position, turns)
        if turn.index <= latest:
            raise DamagedTrajectoryError(f"damaged: call {turn.index} comes after call {latest}")
        latest = turn.index
    reader.check_end()
    lengths = tensors.get("pieces.lengths", ())
    ends = list(accumulate(map(int, lengths)))
    content = tensors["pieces.bytes"].tobytes() if ends else b""
    pieces = {
        int(token_id): content[end - int(length) : end]
        for token_id, length, end in zip(tensors.get("pieces.ids", ()), lengths, ends, strict=True)
    }
    return [*turns.values()], recorded, pieces


def _metadata_of(content: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file.

    The file begins with the length of its header, 8 bytes little-endian, and the header in JSON.
    """
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}


def _is_bfloat16(values: Any) -> bool:
    return str(getattr(values, "dtype", "")) == "torch.bfloat16"


def read_fields(kind: type, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass from their values in a file.

    Args:
        kind: The dataclass.
        values: The values, by field.
        where: Where it is, at the start of the error.

    Raises:
        TrajectoryFileError: A value is not of its field's type.
        ValueError: A value is of its field's type, and none that the field can have.
    """
    hints = _hints(kind)
    fields = {}
    for name, value in values.items():
        try:
            fields[name] = _typed(value, hints[name])
        except TypeError as error:
            raise DamagedTrajectoryError(f"damaged: {where}{kind.__name__}.{name} is {value!r:.60}") from error
    return fields


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    arrays = dict.fromkeys((int, float), array)  # Python 3.10 and 3.11 cannot evaluate array[int]
    return get_type_hints(kind, localns={"Trajectory": object, "array": arrays})


def _typed(value: Any, hint: Any) -> Any:
    """Return a value of a JSON file in the type of its field.

    Raises:
        TypeError: It is of another type.
        ValueError: It is of the type's form in JSON, and not one of its values.
    """
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return value
    if kind is UnionType:  # with None
        return None if value is None else _typed(value, arguments[0])
    if kind is bytes:
        return bytes.fromhex(value)
    if kind is Reason:
        return read_reason(value)
    if kind is Hashable:
        value = tuple(_typed(part, kind) for part in value) if isinstance(value, list) else value
        hash(value)
        return value
    if issubclass(kind, Enum):
        return kind(value)
    if kind in (Mapping, dict) and isinstance(value, dict):
        return {arguments[0](key): _typed(entry, arguments[1]) for key, entry in value.items()}
    if issubclass(kind, tuple | list) and isinstance(value, list):
        if kind is list or arguments[1:] == (...,):
            return kind(_typed(entry, arguments[0]) for entry in value)
        hints = arguments or tuple(_hints(kind).values())  # a named one's
        if len(value) > len(hints) or len(value) < len(arguments):  # a named one may have defaults
            raise TypeError
        parts = map(_typed, value, hints)
        return tuple(parts) if kind is tuple else kind(*parts)
    accepted = int | kind if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _type_of(name: str) -> str:
    """Return the type of a tensor, as NumPy writes it."""
    if name in ("trajectory", "pieces.bytes") or ".file." in name:
        return "|u1"
    return "<f8" if name.endswith("logprobs") else "<i4"


_COLUMNS = (
    *("prompt_ids", "output_ids", "logprobs", "prompt_logprobs"),
    *("sampling_mask.ids", "sampling_mask.lengths", "sampling_logprobs"),
)


class _Reader:
    """Returns the tokens of one turn after the other, from the tensors of the file."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._read = dict.fromkeys(tensors, 0)
        for name, values in tensors.items():
            if ".train." in name or name == "seals":  # earlier releases' seals of tokens are not read
                continue
            kind, depth = _type_of(name), 2 if name.startswith("routed_experts.") else 1
            if (values.dtype.str, values.ndim) != (kind, depth):
                raise DamagedTrajectoryError(
                    f"damaged: {name} has the type {values.dtype} and the shape {values.shape}, not {depth} "
                    f"dimension{'s' * (depth > 1)} of {kind[1:]}"
                )
            if kind == "<i4" and values.size and values.min() < 0:
                raise DamagedTrajectoryError(f"damaged: {name} holds {values.min()}")

    def check_end(self) -> None:
        """Check that all tokens belong to turns."""
        for name in _COLUMNS:
            held, read = len(self._tensors.get(name, ())), self._read.get(name, 0)
            if held != read:
                raise DamagedTrajectoryError(f"damaged: {name} has {held} entries, but the turns describe {read}")

    def _next(self, name: str, count: int, *, is_there: bool = True) -> Any:
        if not is_there:
            return None
        start = self._read[name]
        left = len(self._tensors[name]) - start
        if not (type(count) is int and 0 <= count <= left):
            raise DamagedTrajectoryError(f"damaged: a turn describes {count!r} entries of {name}, and {left} are left")
        self._read[name] = start + count
        kind = {"<f8": "d", "<i4": "i"}[_type_of(name)]
        return array(kind, self._tensors[name][start : start + count].tobytes())

    def _images(self, prefix: str, described: Mapping[str, Any]) -> ImageInputs:
        train_inputs: dict[str, Any] = {}
        for name, values in self._tensors.items():
            if name.startswith(f"{prefix}train."):
                name = name.removeprefix(f"{prefix}train.")
                if name in described.get("bfloat16", ()):
                    import torch

                    values = torch.from_numpy(values).view(torch.bfloat16)
                train_inputs[name] = values
        pictures = tuple(
            Picture(self._tensors[f"{prefix}file.{i}"].tobytes(), **picture)
            for i, picture in enumerate(described["images"])
        )
        return ImageInputs(pictures, array("i", self._tensors[f"{prefix}sent_ids"].tobytes()), train_inputs)

    def _generation(self, answer: Mapping[str, Any], experts: Any, where: str) -> Generation:
        count = answer["sampled_tokens"]
        mask = None
        if answer.get("has_sampling_mask"):
            lengths = self._next("sampling_mask.lengths", count)
            mask = SamplingMask(self._next("sampling_mask.ids", sum(lengths)), lengths)
        version = answer["weight_version"]
        known = {name: answer[name] for name in _GENERATION_FIELDS if name != "meta_info"}
        known["weight_version"] = None if version is None else str(version)
        return Generation(
            **read_fields(Generation, known, where),
            meta_json=to_json(answer["meta_info"]),
            output_ids=self._next("output_ids", count),
            logprobs=self._next("logprobs", count, is_there=answer["has_logprobs"]),
            sampling_mask=mask,
            sampling_logprobs=self._next(
                "sampling_logprobs", count, is_there=answer.get("has_sampling_logprobs", False)
            ),
            routed_experts=None if experts is None else base64.b64encode(experts.tobytes()).decode(),
        )

    def turn(self, described: Mapping[str, Any], position: int, turns: Mapping[int, Turn]) -> Turn:
        count = described["prompt_tokens"]
        answer = described["answer"]
        parent = described["parent"]
        if parent is not None and parent not in turns:
            raise DamagedTrajectoryError(f"damaged: the parent of turn {position} is {parent!r}")
        where = f"call {described['index']}: "
        known = {name: described[name] for name in _TURN_FIELDS if name in described}
        known |= {name: described[name] for name in _REQUIRED_FIELDS}
        text = None if answer is None else answer.get("text")
        known |= {"why": described["reason"], "fate": described["note"] or None, "text": text}
        cause, outcome = described["cause"], described.get("cause_outcome")  # earlier files lack it
        if cause is not None:
            known["cause"] = RecordedError(cause, None if outcome is None else TerminationReason(outcome))
        turn = Turn(
            **read_fields(Turn, known, where),
            parent=None if parent is None else turns[parent],
            prompt_ids=self._next("prompt_ids", count),
            prompt_logprobs=self._next("prompt_logprobs", count, is_there=described["has_prompt_logprobs"]),
            images=None if described["images"] is None else self._images(f"images.{position}.", described),
        )
        if answer is not None:
            turn.generation = self._generation(answer, self._tensors.get(f"routed_experts.{position}"), where)
            if answer.get("is_resumed"):
                turn.resumes, turn.status = turn.generation, TurnStatus.CUT  # earlier files say "failed"
        self._check(turn)
        return turn

    def _check(self, turn: Turn) -> None:
        """Check what no type tells."""
        answer, parent = turn.generation, turn.parent
        wrong = None
        if parent is not None and not 0 <= (turn.parent_kept or 0) <= len(parent.output_ids):
            wrong = f"keeps {turn.parent_kept} of the {len(parent.output_ids)} tokens that the turn before it sampled"
        elif not all({"toolUseId", "name", "id"} <= call.keys() for call in turn.tool_calls):
            wrong = "has a tool call without an id or a name"
        elif answer is not None and parent is None and not turn.prompt_ids:
            wrong = "opens a sequence without a prompt"
        elif answer is not None and answer.finish_type not in FINISH_TYPES:
            wrong = f"ended with {answer.finish_type!r}"
        elif answer is not None and not are_in_order(answer.weight_versions, len(answer.output_ids)):
            wrong = f"has versions that do not fit its {len(answer.output_ids)} sampled tokens"
        elif answer is not None and not turn.constrained and any(map(math.isnan, answer.logprobs or ())):
            wrong = "has a logprob that is not a number"
        if wrong is not None:
            raise DamagedTrajectoryError(f"damaged: call {turn.index} {wrong}")


def write_file(path: str | PathLike[str], content: bytes) -> None:
    """Write a whole file atomically: a full disk or a kill leaves the previous content.

    Devices and pipes, such as `/dev/stdout`, are written to.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a new file would replace a device
        path.write_bytes(content)
        return
    # Not by tempfile, whose files only their owner can read.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
