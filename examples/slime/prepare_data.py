"""Write dapo-math-17k (training) and aime-2024 (evaluation) as slime reads them: objects with prompt and label.

python prepare_data.py ~/data
python prepare_data.py ~/data --dapo my-dapo.jsonl --aime my-aime.jsonl   # from local files
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DATASETS = {"dapo-math-17k": "zhuzilin/dapo-math-17k", "aime-2024": "zhuzilin/aime-2024"}


def rows_of(source: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a local JSON-lines file, or of a dataset on the Hugging Face Hub.

    Raises:
        ValueError: A line is no JSON object.
    """
    path = Path(source)
    if not path.is_file():
        from datasets import load_dataset

        yield from load_dataset(source, split="train")
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield row


def prepared(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as slime reads it: chat messages and the answer as text.

    Raises:
        ValueError: It has no prompt or no label.
    """
    prompt, label = row.get("prompt"), row.get("label")
    if isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"no prompt in {json.dumps(dict(row), default=str)[:200]}")
    if label is None or not str(label).strip():
        raise ValueError(f"no label in {json.dumps(dict(row), default=str)[:200]}")
    return {**row, "prompt": prompt, "label": str(label)}


def write(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows to a file and return how many there are; an error leaves no half file.

    Raises:
        ValueError: A row has no prompt or no label, or there is none.
    """
    temporary = path.with_name(f".{path.name}.part")
    count = 0
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(prepared(row), ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise ValueError(f"there are no rows for {path}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--dapo", default=DATASETS["dapo-math-17k"], help="a dataset or a JSON-lines file")
    parser.add_argument("--aime", default=DATASETS["aime-2024"], help="likewise")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, source in (("dapo-math-17k", arguments.dapo), ("aime-2024", arguments.aime)):
        path = arguments.folder / f"{name}.jsonl"
        print(f"{path}: {write(rows_of(source), path)} rows")


if __name__ == "__main__":
    main()
