import json
import sys
from types import ModuleType

import pytest

from strands_env.eval.benchmarks import BENCHMARKS, TaskError, load_benchmark, load_tasks


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1?", "answer": "2", "id": "x"},
        {"Problem": "1+1?", "Answer": "2", "ID": "x"},
        {"prompt": "1+1?", "label": "2", "task_id": "x"},
        {"message": "1+1?", "task_context": {"id": "x", "ground_truth": "2"}},
    ],
)
def test_usual_fields_are_found_by_themselves(tmp_path, row):
    (action,) = load_tasks(write(tmp_path / "t.jsonl", [row]))
    assert (action.message, action.task_context.ground_truth, action.task_context.id) == ("1+1?", "2", "x")


def test_fields_can_be_named_and_further_ones_are_kept(tmp_path):
    row = {"q": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": 0}, "level": 5}
    (action,) = load_tasks(
        write(tmp_path / "t.jsonl", [row]), question_field="q", answer_field="reward_model.ground_truth"
    )
    assert action.message == row["q"] and action.task_context.ground_truth == 0
    assert action.task_context.id is None and action.task_context.level == 5


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answer": "2"}, "line 2: no question: looked for question, problem"),
        ({"question": " ", "answer": "2"}, "line 2: its question is empty"),
        ({"question": "?"}, "line 2: no answer"),
        ({"question": "?", "answer": None}, "line 2: its answer is empty"),
        ({"question": 7, "answer": "2"}, "line 2: question is no text"),
        (["question"], "line 2: not an object"),
    ],
)
def test_a_row_that_is_no_task_is_refused_with_its_number(tmp_path, row, told):
    path = write(tmp_path / "t.jsonl", [{"question": "?", "answer": 0}, row])
    with pytest.raises(TaskError, match=told):
        load_tasks(path)


def test_answers_may_be_left_out_where_nobody_needs_them(tmp_path):
    assert len(load_tasks(write(tmp_path / "t.jsonl", [{"question": "?"}]), needs_answer=False)) == 1


def test_a_json_list_is_taken_too(tmp_path):
    (tmp_path / "t.json").write_text('[{"question": "?", "answer": "1"}]')
    assert len(load_tasks(tmp_path / "t.json")) == 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.jsonl", "{broken\n", "line 1: not JSON"),
        ("t.jsonl", "", "no tasks in it"),
        ("t.json", "{}", "holds one list"),
        ("t.txt", "a,b", "are read from"),
        ("t.csv", "", "no tasks in it"),
        ("t.csv", "question,answer\n", "no tasks in it"),
        ("t.csv", "question,answer\n1,2\n1\n", "line 3: it has not the 2 fields"),
        ("t.csv", "question,answer\n1,2,3\n", "line 2: it has not the 2 fields"),
        ("t.csv", 'question,answer\n"1"x,2\n', "line 2: not CSV"),
        ("t.csv", "question,solution\n1,2\n", "line 2: no answer"),
        ("t.json", "[", "not JSON"),
    ],
)
def test_a_file_without_tasks_is_refused(tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    with pytest.raises(TaskError, match=told):
        load_tasks(tmp_path / name)
    with pytest.raises(TaskError, match="No such file"):
        load_tasks(tmp_path / f"missing-{name}") if name != "t.txt" else load_tasks(tmp_path / "missing.jsonl")


def test_tables_are_read_with_their_quotes_and_whatever_a_spreadsheet_puts_before_them(tmp_path):
    """Row B15."""
    text = '\ufeffid,Question,answer,level\r\nx,"two\nlines, ""quoted""",007,3\r\n,?,½,\r\n'
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    first, second = load_tasks(tmp_path / "t.csv")
    assert first.message == 'two\nlines, "quoted"'
    assert (first.task_context.id, first.task_context.ground_truth, first.task_context.level) == ("x", "007", "3")
    assert (second.task_context.id, second.task_context.ground_truth) == (None, "½")
    (tmp_path / "t.tsv").write_text("question\tanswer\n" + "x" * 200_000 + "\t1,2\n")
    (action,) = load_tasks(tmp_path / "t.tsv")
    assert len(action.message) == 200_000 and action.task_context.ground_truth == "1,2"


def test_a_ground_truth_that_the_reward_cannot_read_is_refused_with_its_file_and_line(tmp_path):
    """Bad input, rows B3 and B15."""

    def check(truth):
        if truth == "?":
            raise ValueError("'?' cannot\nbe read")

    rows = [{"question": "1", "answer": "1"}, {"question": "2", "answer": "?"}]
    path = write(tmp_path / "t.jsonl", rows)
    path.write_text("\n" + path.read_text())
    with pytest.raises(TaskError, match=rf"^{path}, line 3: '\?' cannot be read$"):
        load_tasks(path, check_truth=check)
    assert len(load_tasks(path, check_truth=check, limit=1)) == 1
    (tmp_path / "t.json").write_text(json.dumps(rows))
    with pytest.raises(TaskError, match=r"t.json, row 2: '\?' cannot be read"):
        load_tasks(tmp_path / "t.json", check_truth=check)
    with pytest.raises(TaskError, match=r"line 3: '\?' cannot be read"):
        load_benchmark("math-500", path, check_truth=check)


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("aime-2024", {"id": 60, "problem": "?", "solution": "...", "answer": "204", "year": "2024"}, "204"),
        ("aime-2025", {"problem": "?", "answer": 70, "id": "0"}, "70"),
        ("gsm8k", {"question": "?", "answer": "3*6=18\n#### 1,018"}, "1018"),
        ("gsm8k", {"question": "?", "answer": "1018"}, "1018"),
        ("math-500", {"problem": "?", "answer": r"\frac{1}{2}", "unique_id": "test/a/1.json"}, r"\frac{1}{2}"),
    ],
)
def test_benchmarks_are_read_from_a_local_file(tmp_path, name, row, answer):
    (action,) = load_benchmark(name, write(tmp_path / "t.jsonl", [row]))
    assert action.message == "?" and action.task_context.ground_truth == answer


def test_benchmarks_are_loaded_with_the_package_datasets(monkeypatch):
    asked = []
    module = ModuleType("datasets")
    rows = {"question": "?", "problem": "?", "answer": "#### 5", "id": 1}

    def load_dataset(path, name, *, split):
        asked.append((path, name, split))
        return [rows]

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    for name in BENCHMARKS:
        assert len(load_benchmark(name)) == 1
    assert ("openai/gsm8k", "main", "test") in asked and len(asked) == 4
    rows["answer"] = "5"
    with pytest.raises(TaskError, match="gsm8k, row 1: its answer has no '#### result'"):
        load_benchmark("gsm8k")


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"pip install -e '.\[datasets\]', or name a local file"):
        load_benchmark("gsm8k")
    with pytest.raises(TaskError, match="there is no benchmark 'gsm9k': aime-2024"):
        load_benchmark("gsm9k")
