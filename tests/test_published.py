"""The published tables: every row is whole, and can be matched with an evaluation of ours."""

import pytest

from eval.published import QUESTIONS, STUDIES
from eval.report_data import METRIC_LABELS
from tasks.registry import TASKS

ROWS = [(study, row) for study in STUDIES for row in study.rows]


@pytest.mark.parametrize("study, row", ROWS, ids=[f"{study.name}: {row.label}" for study, row in ROWS])
def test_rows_are_of_a_task_that_there_is(study, row):
    assert row.arm is None or row.arm in TASKS[study.task].arms
    assert row.stage in ("untrained", "trained", "with_untrained_partner")
    assert set(row.values) <= set(METRIC_LABELS)
    assert all(0 <= v <= 1 for metric, values in row.values.items() if metric != "note_chars" for v in values)
    assert row.interval is None or row.interval[0] <= row.values["pass_at_1"][0] <= row.interval[1]


def test_every_task_has_its_question():
    assert set(QUESTIONS) == set(TASKS)
